"""Causal attention by FlashAttention-3 (Hopper). The transposition of views costs nothing.

Arguments: q, k, v (batch, heads, length, width)
Package: flash-attn-3
GPU: needed
Interface: https://github.com/Dao-AILab/flash-attention (folder hopper)
"""

try:
    from flash_attn_interface import flash_attn_func
except ImportError as error:
    raise ImportError(
        "flash-attn-3 is not installed in this environment; build the folder hopper of Dao-AILab/flash-attention"
    ) from error


CAUSAL = True


def kernel_function(q, k, v):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = flash_attn_func(q, k, v, causal=CAUSAL)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
