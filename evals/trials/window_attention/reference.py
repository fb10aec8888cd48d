"""Causal attention of a prefill over a sliding window, with a learned sink for each head: one more score in each row's
softmax that has no value. Queries (tokens, heads, 64), keys and values (tokens, key heads, 64); eight query heads share
a key head. Query i sees keys i - WINDOW + 1 to i.
"""

import torch
from torch import nn

TOKENS, HEADS, KEY_HEADS, DIM = 8192, 64, 8, 64
WINDOW = 1024


class Model(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(heads, dtype=torch.bfloat16))

    def forward(self, q, k, v):
        tokens, heads, dim = q.shape
        shared = heads // k.shape[1]
        position = torch.arange(tokens, device=q.device)
        distance = position[:, None] - position[None, :]
        hidden = (distance < 0) | (distance >= WINDOW)
        out = torch.empty_like(q)
        for head in range(heads):
            scores = (q[:, head] @ k[:, head // shared].T).float() * dim**-0.5
            scores = scores.masked_fill(hidden, float("-inf"))
            sink = self.sinks[head].float().expand(tokens, 1)
            weights = torch.cat([scores, sink], dim=1).softmax(-1)[:, :-1]
            out[:, head] = weights.to(v.dtype) @ v[:, head // shared]
        return out


def get_inputs():
    return [
        torch.randn(TOKENS, HEADS, DIM, dtype=torch.bfloat16),
        torch.randn(TOKENS, KEY_HEADS, DIM, dtype=torch.bfloat16),
        torch.randn(TOKENS, KEY_HEADS, DIM, dtype=torch.bfloat16),
    ]


def get_init_inputs():
    return [HEADS]
