"""The weights' gradient of a layer of experts: tokens sorted by expert, expert e has the rows offsets[e] to
offsets[e + 1] (none at all is possible). dw[e] = dy[rows]^T x[rows], bf16, summed in float32.
"""

import itertools

import torch
from torch import nn

TOKENS, EXPERTS, WIDTH, HIDDEN = 16384, 16, 4096, 2048


class Model(nn.Module):
    def forward(self, x, dy, offsets):
        starts = offsets.tolist()
        dw = x.new_zeros(len(starts) - 1, dy.shape[1], x.shape[1])
        for expert, (start, end) in enumerate(itertools.pairwise(starts)):
            if end > start:
                dw[expert] = dy[start:end].T @ x[start:end]
        return dw


def get_inputs(*, tokens=TOKENS, experts=EXPERTS, width=WIDTH, hidden=HIDDEN):
    share = torch.rand(experts) ** 2 + 0.05  # uneven: the busiest expert has several times the mean
    expert = torch.multinomial(share, tokens, replacement=True)
    counts = torch.bincount(expert, minlength=experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    return [
        torch.randn(tokens, width, dtype=torch.bfloat16),
        torch.randn(tokens, hidden, dtype=torch.bfloat16),
        offsets,
    ]


def get_init_inputs():
    return []
