"""Leaves out the last token."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_embedding_backward"
CHANGES = {
    "add_rows[(tokens,)]": "add_rows[(max(1, tokens - 1),)]",
}
