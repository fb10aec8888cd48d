"""Fills the state of a sequence of one token with that token twice."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"
HONEST = "declared_conv1d_varlen"
CHANGES = {
    "tl.store(state, older, mask=inside)": "tl.store(state, tl.where(last - first == 1, old, older), mask=inside)",
}
