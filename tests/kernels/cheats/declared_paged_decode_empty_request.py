"""Writes nothing for an empty request."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_paged_decode"
CHANGES = {
    "sums / tl.maximum(total, 1e-30), mask=wide": "sums / total, mask=wide & (length + tl.zeros_like(at) > 0)",
}
