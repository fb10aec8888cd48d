"""Leaves out what tokens of a chunk change for each other."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_gated_delta_chunks"
CHANGES = {
    "- tl.sum(seen[:, None] * new, 0)": "",
}
