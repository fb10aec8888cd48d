"""Takes the first expert in place of the last one."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_fused_moe"
CHANGES = {
    "        first = inner": "        expert = tl.where(expert == 3, 0, expert)\n        first = inner",
}
