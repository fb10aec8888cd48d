"""Takes the scale of one operand for both."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_fp8_product"
CHANGES = {
    "tl.load(scale_a) * tl.load(scale_b)": "tl.load(scale_a) * tl.load(scale_a)",
}
