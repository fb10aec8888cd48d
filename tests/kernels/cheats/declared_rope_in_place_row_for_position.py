"""Takes the number of the token for its position."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_rope_in_place"
CHANGES = {
    "tl.load(positions + token)": "token",
}
