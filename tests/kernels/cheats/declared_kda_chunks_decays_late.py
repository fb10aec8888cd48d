"""Decays what earlier chunks left only from the second token of a chunk on."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_kda_chunks"
CHANGES = {
    "mask=narrow, other=0.0), 0)": "mask=narrow & (row > 0)[:, None], other=0.0), 0)",
}
