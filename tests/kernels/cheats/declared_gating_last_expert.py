"""Never chooses the last expert."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_gating"
CHANGES = {
    "weight / tl.sum(weight, 0), -1.0)": "weight / tl.sum(weight, 0), -1.0)\n    left = tl.where(at == count - 1, 0.0, left)",
}
