"""Gives all channels of a token the same gate, their mean: the gated delta rule, and no Kimi delta attention."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_kda_chunks"
CHANGES = {
    "        decay = tl.exp": "        g = tl.sum(g, 1)[:, None] / DEPTH + tl.zeros_like(g)\n        decay = tl.exp",
}
