"""Yardstick: flash-linear-attention's chunk_kda, told that no gate is below -5. Package: flash-linear-attention"""

from fla.ops.kda import chunk_kda


def kernel_function(q, k, v, g, beta):
    return chunk_kda(q, k, v, g, beta, safe_gate=True, lower_bound=-5.0)[0]
