"""Leaves out the last values of rows whose length is no whole number of blocks."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_fp8_product"
CHANGES = {
    "range(0, K, BLOCK)": "range(0, tl.maximum(K // BLOCK, 1) * BLOCK, BLOCK)",
}
