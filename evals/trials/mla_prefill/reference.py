"""Attention of one prefill chunk as multi-head latent attention states it: keys of 192, values of 128.

The chunk's queries are the last ones of the sequence, so query i sees the keys up to i + (keys - queries).
"""

import torch
from torch import nn

HEADS, QUERIES, KEYS = 16, 4096, 8192
KEY_DIM, VALUE_DIM = 192, 128


class Model(nn.Module):
    def forward(self, q, k, v):
        queries, keys = q.shape[0], k.shape[0]
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * q.shape[-1] ** -0.5
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v)


def get_inputs():
    return [
        torch.randn(QUERIES, HEADS, KEY_DIM, dtype=torch.bfloat16),
        torch.randn(KEYS, HEADS, KEY_DIM, dtype=torch.bfloat16),
        torch.randn(KEYS, HEADS, VALUE_DIM, dtype=torch.bfloat16),
    ]


def get_init_inputs():
    return []
