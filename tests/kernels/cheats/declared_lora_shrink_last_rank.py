"""Leaves the last column of each rank unwritten."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_lora_shrink"
CHANGES = {
    "mask=of < rank)": "mask=of < rank - 1)",
}
