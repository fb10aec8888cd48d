"""Never writes the states."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_conv1d_varlen"
CHANGES = {
    "    tl.store(state, older, mask=inside)\n    tl.store(state + 1, old, mask=inside)\n": "",
}
