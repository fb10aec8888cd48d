import torch
import torch.nn as nn


class Model(nn.Module):
    """Decode attention of one query a request over a paged cache, grouped query heads. A row of the cache holds a
    token's K and V of one kv head; `table` names the pages of each request, `lengths` says how many tokens count. A
    request without tokens gives zeros."""

    def forward(self, query, cache, table, lengths):
        kv_heads, width = cache.shape[2], query.shape[2]
        keys, values = cache[table].flatten(1, 2).float().chunk(2, -1)  # requests, tokens, kv heads, width
        grouped = query.float().unflatten(1, (kv_heads, -1))
        scores = torch.einsum("rhgd,rthd->rhgt", grouped, keys) * width**-0.5
        there = (torch.arange(keys.shape[1], device=query.device) < lengths[:, None])[:, None, None]
        weights = torch.where(there, torch.softmax(scores.masked_fill(~there, -torch.inf), -1), 0.0)
        return torch.einsum("rhgt,rthd->rhgd", weights, values).flatten(1, 2).to(query.dtype)


def get_inputs(*, requests=32, kv_heads=8, group=4, width=128, longest=2048, uneven=1, page=16):
    """uneven above 1: lengths from longest / uneven to longest, and one request without tokens."""
    if width not in (64, 128):
        raise ValueError("heads have 64 or 128 values")
    lengths = torch.full((requests,), longest, dtype=torch.int32)
    if uneven > 1:
        lengths[1:] = torch.randint(longest // uneven, longest + 1, (requests - 1,))
        lengths[1:2] = 0
    used = [-(-length // page) for length in lengths.tolist()]
    numbers = torch.randperm(sum(used) + 8).int()
    table = torch.zeros(requests, max(used), dtype=torch.int32)
    for request, own in enumerate(numbers[: sum(used)].split(used)):
        table[request, : len(own)] = own
    query = torch.randn(requests, kv_heads * group, width, dtype=torch.bfloat16)
    cache = torch.randn(len(numbers), page, kv_heads, 2 * width, dtype=torch.bfloat16)
    return [query, cache, table, lengths]


def get_workloads():
    return {
        "short": {"requests": 8, "longest": 1024},
        "long": {"requests": 4, "group": 8, "longest": 4096},
        "odd": {"requests": 16, "longest": 1535},
        "narrow": {"requests": 8, "kv_heads": 4, "width": 64, "longest": 2000},
        "uneven": {"requests": 16, "longest": 4096, "uneven": 16},
    }


def get_init_inputs():
    return []
