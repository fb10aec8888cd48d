"""Names the same place for all tied values."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_topk"
CHANGES = {
    "tl.where(left & (score == best), at, -1)": "tl.where(score == best, at, -1)",
}
