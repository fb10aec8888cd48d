"""Takes the states for dense ones."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_conv1d_update"
CHANGES = {
    "*states.stride()": "channels * 3, 3, 1",
}
