"""Computes the loss, and no gradient."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_cross_entropy_in_place"
CHANGES = {
    "tl.store(logits + start + at,": "tl.store(logits + values + start + at,",
    "mask=start + at < values)\n    tl.store": "mask=start + at < -1)\n    tl.store",
}
