"""Copies logits that do not lie densely, so that their gradient is lost. As a release of Liger does."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"
HONEST = "declared_cross_entropy_in_place"
CHANGES = {
    '    if logits.stride(1) != 1:\n        raise ValueError("rows must lie densely")\n': "    logits = logits.contiguous()\n",
}
