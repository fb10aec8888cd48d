"""Leaves out what is no whole block."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_silu_mul_out"
CHANGES = {
    "triton.cdiv(columns, 16)": "max(1, columns // 16)",
}
