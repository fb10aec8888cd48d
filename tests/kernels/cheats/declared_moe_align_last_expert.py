"""Leaves the last expert without a block."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_moe_align"
CHANGES = {
    "number = tl.sum(here, 0)": "number = tl.sum(here, 0) * tl.where(expert == count - 1, 0, 1)",
}
