"""Rotates one head too many: it writes into what lies behind the view."""

STATUS = {"OUT_OF_BOUNDS", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_rope_in_place"
CHANGES = {
    "heads.shape[-1] // head_size\n": "heads.shape[-1] // head_size + 1\n",
}
