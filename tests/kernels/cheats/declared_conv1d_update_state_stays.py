"""Never writes the states."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_conv1d_update"
CHANGES = {
    "            tl.store(state + (time - 1) * of_time, old, mask=inside)": "            pass",
    "    tl.store(state + (WIDTH - 2) * of_time, new, mask=inside)\n": "",
}
