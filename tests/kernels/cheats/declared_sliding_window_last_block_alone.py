"""Looks at the tokens of its own block alone."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_sliding_window"
CHANGES = {
    "tl.maximum(row - window + 1, 0) // BLOCK": "row // BLOCK",
}
