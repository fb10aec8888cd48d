"""Leaves out the rows after the last whole part."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_layer_norm_backward"
CHANGES = {
    "triton.cdiv(rows, count)": "max(1, rows // count)",
}
