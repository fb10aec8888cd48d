"""Names the place before a tied value."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_topk"
CHANGES = {
    "index.to(tl.int64)": "tl.maximum(index - 1, 0).to(tl.int64)",
}
