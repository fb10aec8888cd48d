"""Takes the low four bits of a byte for the odd value of k."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_int4_product"
CHANGES = {
    "(two & 15).to(tl.float32) * even[:, None] + (two >> 4).to(tl.float32) * odd[:, None]": "(two & 15).to(tl.float32) * odd[:, None] + (two >> 4).to(tl.float32) * even[:, None]",
}
