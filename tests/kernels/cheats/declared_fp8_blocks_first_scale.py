"""Takes the scale of the first block for all."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_fp8_blocks"
CHANGES = {
    "tl.load(scales_b + tile * blocks + block)": "tl.load(scales_b + tile * blocks)",
}
