"""Writes nothing."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_cache_write"
CHANGES = {
    "tl.zeros_like(at) >= 0": "tl.zeros_like(at) < -9",
}
