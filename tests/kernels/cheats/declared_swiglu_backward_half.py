"""Leaves b as it was."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_swiglu_backward"
CHANGES = {
    "    tl.store(b + row + at, slope * x * gate, mask=inside)\n": "",
}
