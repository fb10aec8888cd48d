"""Leaves the residual as it was."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_add_rms_norm"
CHANGES = {
    "    tl.store(residual + row + at, total, mask=inside)\n": "",
}
