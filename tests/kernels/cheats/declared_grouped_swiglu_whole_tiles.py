"""Writes whole tiles of rows: the last ones of an expert go over the first rows of the next expert, or past the end."""

STATUS = {"WRONG_VALUES", "OUT_OF_BOUNDS"}
CAUGHT_BY = "verify"
HONEST = "declared_grouped_swiglu"
CHANGES = {
    "mask=(row < last) & (column < columns))": "mask=column < columns)",
}
