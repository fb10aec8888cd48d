"""Begins each sequence at the first one's start."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_varlen_attention"
CHANGES = {
    "for start in range(first, last, BLOCK)": "for start in range(0, last, BLOCK)",
}
