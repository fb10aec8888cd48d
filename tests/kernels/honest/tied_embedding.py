"""Scores of each token against all others by one table, which Model holds under two names."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.embedding(tokens))


def get_inputs():
    return [torch.randint(0, 50, (40,))]


@triton.jit
def score(tokens, table, y, V, D: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0)
    o, v = tl.arange(0, D), tl.arange(0, B)
    own = tl.load(table + tl.load(tokens + i) * D + o)
    every = tl.load(table + v[:, None] * D + o[None, :], v[:, None] < V, other=0.0)
    tl.store(y + i * V + v, tl.sum(every * own[None, :], 1), v < V)


class ModelNew(Model):
    def forward(self, tokens):
        tokens, table = tokens.contiguous(), self.out.weight
        y = torch.empty(len(tokens), len(table), device=table.device)
        score[(len(tokens),)](tokens, table, y, len(table), D=16, B=64)
        return y
