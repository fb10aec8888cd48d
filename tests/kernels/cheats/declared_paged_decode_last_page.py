"""Takes the last page as a whole."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_paged_decode"
CHANGES = {
    " & (number * page + slot < length)": "",
}
