"""Kimi delta attention in chunks, by flash-linear-attention.

Arguments: q, k (batch, time, heads, K), v (batch, time, heads, V), g (batch, time, heads, K) as logarithms, beta (batch, time, heads)
Package: flash-linear-attention
GPU: needed
Interface: https://github.com/fla-org/flash-linear-attention
"""

try:
    from fla.ops.kda import chunk_kda
except ImportError as error:
    raise ImportError(
        "flash-linear-attention is not installed in this environment; run: pip install flash-linear-attention"
    ) from error


def kernel_function(q, k, v, g, beta):
    out, _ = chunk_kda(q, k, v, g, beta)
    return out
