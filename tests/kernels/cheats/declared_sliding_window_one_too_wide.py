"""Looks one token too far back."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_sliding_window"
CHANGES = {
    "row - token < window": "row - token <= window",
}
