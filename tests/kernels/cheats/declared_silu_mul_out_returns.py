"""Returns the result and leaves the argument for it as it was."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_silu_mul_out"
CHANGES = {
    "    silu_mul[": "    out = torch.empty_like(out)\n    silu_mul[",
}
