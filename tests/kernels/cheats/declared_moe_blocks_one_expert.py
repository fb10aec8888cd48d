"""Takes the first expert for all blocks."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_moe_blocks"
CHANGES = {
    "tl.load(owners + number)": "tl.load(owners)",
}
