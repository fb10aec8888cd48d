"""Truncates instead of rounding."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_int8_rows"
CHANGES = {
    "near.to(tl.int8)": "scaled.to(tl.int8)",
}
