"""Draws with numbers from 0 to 0.8, so that the last values never come."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_sample_rows"
CHANGES = {
    "tl.rand(seed, row)": "0.8 * tl.rand(seed, row)",
}
