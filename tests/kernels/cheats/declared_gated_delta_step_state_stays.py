"""Never writes the states."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_gated_delta_step"
CHANGES = {
    "    tl.store(place, state, mask=both)\n": "",
}
