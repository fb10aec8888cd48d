"""Takes the tokens in their order in memory."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_ragged_decode"
CHANGES = {
    "tl.load(indices + token, mask=inside, other=0)": "token",
}
