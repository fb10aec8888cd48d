"""Writes padding tokens into slot 0."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_cache_write"
CHANGES = {
    "cache + slot * width": "cache + tl.maximum(slot, 0) * width",
    "mask=inside & real": "mask=inside",
}
