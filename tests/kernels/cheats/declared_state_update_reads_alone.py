"""Returns the new state's sum and never writes the state."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_state_update"
CHANGES = {
    "        tl.store(row, value, mask=inside)\n": "",
}
