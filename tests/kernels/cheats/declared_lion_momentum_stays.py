"""Leaves the momentum as it was."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_lion"
CHANGES = {
    "    tl.store(momentum + at, 0.99 * old + 0.01 * slope, mask=inside)\n": "",
}
