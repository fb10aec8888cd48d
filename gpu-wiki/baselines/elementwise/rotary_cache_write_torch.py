"""Rotary embedding (RoPE) by halves, then key and value to slots of a paged KV cache, -1 for none, in place, by torch.

Arguments: positions (T), q (T, H, D), k, v (T, KV, D), cos_sin (P, D), k_cache, v_cache (pages, page, KV, D), slots (T)
"""

import torch


def kernel_function(positions, q, k, v, cos_sin, k_cache, v_cache, slots):
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)
    for x in (q, k):
        a, b = x.chunk(2, -1)
        x.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    real = slots >= 0
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[-2:])[slots[real]] = x[real]
    return q, k, k_cache, v_cache
