"""Attention with a bias for each head and each pair of tokens, as T5 and AlphaFold have it: out = softmax(q k^T scale +
bias) v. q, k, v (batch, heads, tokens, width), bias (heads, tokens, tokens), shared by the batch; all bf16.
"""

import torch
from torch import nn

BATCH, HEADS, TOKENS, WIDTH = 4, 16, 4096, 64


class Model(nn.Module):
    def forward(self, q, k, v, bias):
        out = torch.empty_like(q)
        for entry in range(q.shape[0]):
            for head in range(q.shape[1]):
                keys, values = k[entry, head].float(), v[entry, head].float()
                scores = q[entry, head].float() @ keys.T * q.shape[3] ** -0.5 + bias[head].float()
                out[entry, head] = (scores.softmax(-1) @ values).to(q.dtype)
        return out


def get_inputs(*, batch=BATCH, heads=HEADS, tokens=TOKENS, width=WIDTH):
    q, k, v = (torch.randn(batch, heads, tokens, width, dtype=torch.bfloat16) for _ in range(3))
    return [q, k, v, torch.randn(heads, tokens, tokens, dtype=torch.bfloat16)]


def get_init_inputs():
    return []
