"""Leaves the last channel's state as it was."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_state_update"
CHANGES = {
    "tl.store(row, value, mask=inside)": "tl.store(row, value, mask=inside & (channel + 1 + tl.zeros_like(at) < channels))",
}
