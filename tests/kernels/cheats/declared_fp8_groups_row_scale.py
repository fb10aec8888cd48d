"""Takes a power of two for the scale."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_fp8_groups"
CHANGES = {
    "1e-10) / 448\n    tl.store(out": "1e-10) / 512\n    tl.store(out",
}
