"""Writes into the weight as well, which the task does not declare."""

STATUS = {"INPUT_MUTATED"}
CAUGHT_BY = "verify"
HONEST = "declared_add_rms_norm"
CHANGES = {
    "    if x.numel():": "    weight.mul_(1.0001)\n    if x.numel():",
}
