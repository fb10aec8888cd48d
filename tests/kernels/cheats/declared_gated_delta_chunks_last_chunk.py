"""Leaves out what is no whole chunk."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_gated_delta_chunks"
CHANGES = {
    "range(0, tokens, CHUNK)": "range(0, tl.maximum(1, tokens - CHUNK + 1), CHUNK)",
}
