"""Causal attention by torch's cudnn path alone.

Arguments: q, k, v (batch, heads, length, width)
GPU: needed
Interface: torch.nn.attention.sdpa_kernel
"""

from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

CAUSAL = True


def kernel_function(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL)
