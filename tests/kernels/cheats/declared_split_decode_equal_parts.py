"""Adds the parts without regard to their maxima."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_split_decode"
CHANGES = {
    "tl.exp(part - tl.max(part, 0))": "1.0",
}
