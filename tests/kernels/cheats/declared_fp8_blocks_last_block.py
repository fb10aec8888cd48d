"""Leaves out the last block of the depth."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_fp8_blocks"
CHANGES = {
    "in range(blocks)": "in range(tl.maximum(1, blocks - 1))",
}
