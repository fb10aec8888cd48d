"""Causal attention over packed documents: tokens offsets[i] to offsets[i + 1] are document i, and a query sees the keys
of its own document that are not behind it. An empty document is possible. Queries (tokens, heads, width), keys and
values (tokens, key heads, width), bf16; four query heads share a key head. offsets (documents + 1), int32.
"""

import itertools

import torch
from torch import nn

TOKENS, DOCUMENTS, HEADS, KEY_HEADS, WIDTH = 16384, 8, 16, 4, 128


class Model(nn.Module):
    def forward(self, q, k, v, offsets):
        shared = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for start, end in itertools.pairwise(offsets.tolist()):
            hidden = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
            for head in range(q.shape[1]):
                keys, values = (x[start:end, head // shared] for x in (k, v))
                scores = (q[start:end, head].float() @ keys.float().T) * q.shape[2] ** -0.5
                weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                out[start:end, head] = (weights @ values.float()).to(q.dtype)
        return out


def get_inputs(*, tokens=TOKENS, documents=DOCUMENTS, heads=HEADS, key_heads=KEY_HEADS, width=WIDTH):
    q = torch.randn(tokens, heads, width, dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, key_heads, width, dtype=torch.bfloat16) for _ in range(2))
    cuts = torch.randint(0, tokens + 1, (documents - 1,), dtype=torch.int32).sort().values
    return [q, k, v, torch.nn.functional.pad(torch.cat([cuts, cuts.new_tensor([tokens])]), (1, 0))]


def get_init_inputs():
    return []
