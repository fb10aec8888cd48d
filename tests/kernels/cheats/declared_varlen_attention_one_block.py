"""Computes the first block of queries of each sequence alone."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_varlen_attention"
CHANGES = {
    "triton.cdiv(max_seqlen, 4)": "1",
}
