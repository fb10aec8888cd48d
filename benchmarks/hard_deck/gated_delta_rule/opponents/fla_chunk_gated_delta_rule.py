"""Yardstick: flash-linear-attention's chunk_gated_delta_rule. Package: flash-linear-attention"""

from fla.ops.gated_delta_rule import chunk_gated_delta_rule


def kernel_function(q, k, v, g, beta, states, cu_seqlens):
    q, k, v, g, beta = (x[None] for x in (q, k, v, g, beta))
    out, after = chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=states, output_final_state=True, cu_seqlens=cu_seqlens
    )
    return out[0], after
