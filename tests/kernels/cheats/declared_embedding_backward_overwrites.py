"""Overwrites where indices are equal."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_embedding_backward"
CHANGES = {
    "tl.atomic_add(": "tl.store(",
}
