"""Loses the smallest numbers."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_fp8_groups"
CHANGES = {
    "(value / scale).to": "tl.where(tl.abs(value / scale) < 0.0156, 0.0, value / scale).to",
}
