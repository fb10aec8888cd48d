"""Takes the pages in their order in memory."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_paged_decode"
CHANGES = {
    "tl.load(table + request * most + number).to(tl.int64)": "(request * most + number)",
}
