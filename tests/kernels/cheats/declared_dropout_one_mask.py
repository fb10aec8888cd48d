"""Draws the same mask for every seed."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_dropout_seed"
CHANGES = {
    "tl.rand(seed, at)": "tl.rand(11, at)",
}
