"""Gated delta rule in chunks, by flash-linear-attention.

Arguments: q, k (batch, time, heads, K), v (batch, time, heads, V), g (batch, time, heads) as logarithms, beta (batch, time, heads)
Package: flash-linear-attention
GPU: needed
Interface: https://github.com/fla-org/flash-linear-attention
"""

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError as error:
    raise ImportError(
        "flash-linear-attention is not installed in this environment; run: pip install flash-linear-attention"
    ) from error


def kernel_function(q, k, v, g, beta):
    out, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    return out
