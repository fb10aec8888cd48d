"""The products of the tokens of each expert with its weights. Tokens are sorted by expert; experts may have none."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x, weights, ends):
        """x: (tokens, k). weights: (experts, k, n). ends: (experts,), behind the last token of each. (tokens, n)."""
        out = x.new_zeros(x.shape[0], weights.shape[2])
        first = 0
        for expert, end in enumerate(ends.tolist()):
            out[first:end] = x[first:end] @ weights[expert]
            first = end
        return out


def made(tokens: int, experts: int, k: int, n: int):
    chosen = torch.randint(0, max(1, experts // 2), (tokens,)) * 2  # every second expert has no tokens
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32)
    x = torch.randn(tokens, k, dtype=torch.float16)
    return [x, torch.randn(experts, k, n, dtype=torch.float16) * k**-0.5, ends]


def get_inputs():
    return made(4096, 32, 2048, 1408)


def get_init_inputs():
    return []


def get_workloads():
    return {"small": lambda: made(37, 5, 48, 40), "odd": lambda: made(150, 7, 40, 72)}


LAYOUTS = "contiguous"
