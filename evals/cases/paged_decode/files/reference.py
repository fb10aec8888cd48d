"""Attention of one query a request over a paged key-value cache. Table entries behind a request's length are any
number; a request without keys gives zeros."""

import torch
import torch.nn as nn

PAGE = 16


class Model(nn.Module):
    def forward(self, q, keys, values, table, lengths):
        """q: (requests, heads, width). keys, values: (pages, PAGE, key heads, width). table: (requests, pages of the
        longest). lengths: (requests,). Result: like q."""
        out = torch.zeros_like(q)
        group = q.shape[1] // keys.shape[2]
        for request, length in enumerate(lengths.tolist()):
            if length:
                pages = table[request, : -(-length // PAGE)].long()
                k = keys[pages].flatten(0, 1)[:length].repeat_interleave(group, 1)
                v = values[pages].flatten(0, 1)[:length].repeat_interleave(group, 1)
                scores = torch.einsum("hd,lhd->hl", q[request], k) / q.shape[-1] ** 0.5
                out[request] = torch.einsum("hl,lhd->hd", torch.softmax(scores, -1), v)
        return out


def made(requests: int, heads: int, key_heads: int, width: int, longest: int):
    pages_each = -(-longest // PAGE)
    lengths = torch.randint(1, longest + 1, (requests,), dtype=torch.int32)
    lengths[0] = 0
    table = torch.randperm(requests * pages_each).reshape(requests, pages_each).to(torch.int32)
    behind = torch.arange(pages_each) * PAGE >= lengths[:, None]
    table = torch.where(behind, torch.full_like(table, 2**30), table)
    cache = [torch.randn(requests * pages_each, PAGE, key_heads, width, dtype=torch.float16) for _ in range(2)]
    return [torch.randn(requests, heads, width, dtype=torch.float16), *cache, table, lengths]


def get_inputs():
    return made(64, 64, 8, 128, 1024)


def get_init_inputs():
    return []


def get_workloads():
    return {"small": lambda: made(3, 4, 2, 32, 40), "long": lambda: made(2, 3, 1, 64, 150)}


LAYOUTS = "contiguous"
