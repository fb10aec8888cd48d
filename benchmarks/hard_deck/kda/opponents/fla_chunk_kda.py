"""Yardstick: flash-linear-attention's chunk_kda. Package: flash-linear-attention"""

from fla.ops.kda import chunk_kda


def kernel_function(q, k, v, g, beta):
    return chunk_kda(q, k, v, g, beta)[0]
