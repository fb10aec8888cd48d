"""Takes 8 for the zero point, as symmetric checkpoints have it."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_int4_product"
CHANGES = {
    "zero = tl.load(zeros + group * N + n, mask=n < N, other=0.0).to(tl.float32)": "zero = 8.0",
}
