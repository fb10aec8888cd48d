"""Chooses one of several equal experts twice."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_gating"
CHANGES = {
    "left = tl.where(at == index, -1.0, left)": "left = tl.where(at == index, left - 1e-12, left)",
}
