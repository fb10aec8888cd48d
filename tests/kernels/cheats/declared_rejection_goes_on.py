"""Goes on after a rejection."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_rejection"
CHANGES = {
    "still = still & accepted": "still = still & (accepted | (place >= 0))",
}
