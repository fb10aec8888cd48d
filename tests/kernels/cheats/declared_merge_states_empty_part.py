"""Takes an empty part for one of weight 1."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_merge_states"
CHANGES = {
    "of_a, of_b = tl.load(s_a + row), tl.load(s_b + row)": "of_a, of_b = tl.load(s_a + row), tl.maximum(tl.load(s_b + row), 0.0)",
}
