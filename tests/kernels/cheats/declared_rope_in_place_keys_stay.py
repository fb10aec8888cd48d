"""Rotates the queries alone."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_rope_in_place"
CHANGES = {
    "for heads in (query, key)": "for heads in (query,)",
}
