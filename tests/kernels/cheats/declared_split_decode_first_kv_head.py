"""Reads the keys of the first kv head for all groups of query heads."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_split_decode"
CHANGES = {
    "* kv_heads + head) * 32": "* kv_heads) * 32",
}
