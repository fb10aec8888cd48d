"""Writes a whole block, and so into the next slot."""

STATUS = {"OUT_OF_BOUNDS", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_cache_write"
CHANGES = {
    "mask=inside & real": "mask=real",
}
