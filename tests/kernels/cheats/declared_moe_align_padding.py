"""Pads with token 0."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_moe_align"
CHANGES = {
    "tl.store(ids + place, size,": "tl.store(ids + place, 0,",
}
