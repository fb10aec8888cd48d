"""Pages gathered into one tensor, then attention with a mask, by torch.

Arguments: q (requests, heads, width), keys, values (pages, page, kv heads, width), table (requests, columns), lengths (requests)
"""

import torch
from torch.nn import functional


def kernel_function(q, keys, values, table, lengths):
    k, v = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
    mask = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    out = functional.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask[:, None, None], enable_gqa=True)
    return out[:, :, 0]
