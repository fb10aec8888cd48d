"""Takes a padding slot for state 0."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_conv1d_update"
CHANGES = {
    "tl.load(slots + request).to(tl.int64)": "tl.maximum(tl.load(slots + request).to(tl.int64), 0)",
}
