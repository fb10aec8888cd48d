"""Causal attention by whatever torch chooses.

Arguments: q, k, v (batch, heads, length, width)
"""

from torch.nn import functional

CAUSAL = True


def kernel_function(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL)
