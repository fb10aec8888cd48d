"""Draws all rows by one number."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_sample_rows"
CHANGES = {
    "tl.rand(seed, row)": "tl.rand(seed, row * 0)",
}
