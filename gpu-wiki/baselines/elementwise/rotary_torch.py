"""Rotary embedding (RoPE) of query and key, by halves of the head, by torch.

Arguments: q (tokens, heads, width), k (tokens, kv_heads, width), cos (tokens, width / 2), sin (tokens, width / 2)
"""

import torch


def kernel_function(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    return tuple(torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
