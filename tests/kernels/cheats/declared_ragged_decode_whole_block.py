"""Reads the last block of a request as a whole, and so tokens of the next one."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_ragged_decode"
CHANGES = {
    "inside = token < last": "inside = token < first + (last - first + BLOCK - 1) // BLOCK * BLOCK",
}
