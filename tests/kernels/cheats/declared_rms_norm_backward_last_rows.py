"""Leaves the rows after the last eight out of the weight's gradient."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_rms_norm_backward"
CHANGES = {
    "in range(rows):": "in range(rows // 8 * 8 if rows > 8 else rows):",
}
