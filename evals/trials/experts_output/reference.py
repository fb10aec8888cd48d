"""The way out of a layer of experts: each token was sent to two of them. Rows of h are sorted by expert, expert e has the
rows offsets[e] to offsets[e + 1] (none at all is possible); row r belongs to the token tokens[r], with the weight
scales[r]. y[t] = sum over the rows of t of scales[r] * (h[r] @ w[expert]), bf16, summed in float32.
"""

import itertools

import torch
from torch import nn

TOKENS, EXPERTS, WIDTH, HIDDEN = 8192, 16, 4096, 2048


class Model(nn.Module):
    def __init__(self, experts=EXPERTS, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(experts, width, hidden) / width**0.5).bfloat16())

    def forward(self, h, offsets, tokens, scales):
        y = torch.zeros(len(tokens) // 2, self.weight.shape[2], device=h.device)
        starts = offsets.tolist()
        for expert, (start, end) in enumerate(itertools.pairwise(starts)):
            if end > start:
                rows = (h[start:end] @ self.weight[expert]).float() * scales[start:end, None]
                y.index_add_(0, tokens[start:end], rows)
        return y.bfloat16()


def get_inputs(*, tokens=TOKENS, experts=EXPERTS, width=WIDTH):
    if experts < 2:
        raise ValueError("each token goes to two experts")
    scores = torch.randn(tokens, experts) + 0.7 * torch.randn(experts)  # uneven
    best, chosen = scores.topk(2, dim=1)
    order = torch.sort(chosen.flatten(), stable=True).indices
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=counts.device), counts.cumsum(0)]).int()
    scales = best.softmax(1).flatten()[order]
    h = torch.randn(2 * tokens, width, dtype=torch.bfloat16)
    return [h, offsets, order // 2, scales]


def get_init_inputs(*, experts=EXPERTS, width=WIDTH):
    return [experts, width]
