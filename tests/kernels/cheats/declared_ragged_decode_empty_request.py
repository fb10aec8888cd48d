"""Divides by zero for an empty request."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_ragged_decode"
CHANGES = {
    "tl.where(total > 0, total, 1.0)": "total",
}
