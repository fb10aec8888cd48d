"""Returns the larger log-sum-exp."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_merge_states"
CHANGES = {
    "tl.log(a + b) + largest)": "largest)",
}
