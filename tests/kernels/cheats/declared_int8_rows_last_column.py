"""Writes 0 into the last column."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"
HONEST = "declared_int8_rows"
CHANGES = {
    "at, near.to": "at, tl.where(at < columns - 1, near, 0.0).to",
}
