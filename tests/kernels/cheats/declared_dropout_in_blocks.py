"""Draws the same numbers in each block."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_dropout_seed"
CHANGES = {
    "tl.rand(seed, at)": "tl.rand(seed, tl.arange(0, BLOCK))",
}
