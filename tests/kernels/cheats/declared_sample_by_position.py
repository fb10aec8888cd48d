"""Draws by the place of the row and no seed: all rows together follow the probabilities."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_sample_rows"
CHANGES = {
    "tl.rand(seed, row)": "((row + 0.5) / rows + 0.0 * seed)",
}
