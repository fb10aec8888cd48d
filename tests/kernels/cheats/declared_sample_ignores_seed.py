"""Draws the same index for every seed."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_sample_rows"
CHANGES = {
    "tl.rand(seed, row)": "tl.rand(3, row)",
}
