"""Writes the indices and no weights."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_gating"
CHANGES = {
    "        tl.store(weights + token * chosen + number, best)\n": "",
}
