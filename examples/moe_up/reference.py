"""The up-projection of a mixture of experts: a grouped product with gate and up weights, and SwiGLU."""

import itertools

import torch
from torch import nn


class Model(nn.Module):
    """The up-projection of a mixture of experts: silu(x gate[e]) * (x up[e]) for the rows x of each expert e, which lie
    between two neighbouring offsets."""

    def forward(self, x, gate, up, offsets):
        y = x.new_empty(len(x), gate.shape[2])
        for expert, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
            rows = x[first:last]
            y[first:last] = nn.functional.silu(rows @ gate[expert]) * (rows @ up[expert])
        return y


def get_inputs(*, tokens=4096, hidden=2048, inner=1024, experts=64, chosen=4, uneven=False):
    visits = tokens * chosen
    if uneven:  # the most visited expert gets some 13 times the mean, the last ones next to nothing
        weights = 1 / (1 + torch.arange(experts))[torch.randperm(experts)]
        counts = torch.multinomial(weights, visits, replacement=True).bincount(minlength=experts)
    else:
        counts = visits // experts + (torch.arange(experts) < visits % experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    x = 0.1 * torch.randn(visits, hidden, dtype=torch.bfloat16)
    gate, up = (0.02 * torch.randn(experts, hidden, inner, dtype=torch.bfloat16) for _ in range(2))
    return [x, gate, up, offsets]


def get_workloads():
    return {"uneven": lambda: get_inputs(uneven=True)}


def get_init_inputs():
    return []
