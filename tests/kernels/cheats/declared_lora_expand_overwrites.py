"""Overwrites the output instead of adding to it."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_lora_expand"
CHANGES = {
    "tl.load(place, mask=inside, other=0.0) + product": "product",
}
