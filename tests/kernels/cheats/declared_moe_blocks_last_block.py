"""Leaves out the last block of tokens."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_moe_blocks"
CHANGES = {
    "(len(owners), triton": "(max(1, len(owners) - 1), triton",
}
