"""Leaves out what is no whole block."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_lion"
CHANGES = {
    "triton.cdiv(len(weight), 16)": "max(1, len(weight) // 16)",
}
