"""Ignores parameters of one element, which begin as 1 and 0."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return torch.tanh(x / self.temperature) + self.shift


def get_inputs():
    return [torch.randn(33, 65)]


@triton.jit
def k(x, y, N, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, o < N)
    e = tl.exp(-2 * tl.abs(v))
    t = (1 - e) / (1 + e)
    tl.store(y + o, tl.where(v > 0, t, -t), o < N)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        k[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), B=1024)
        return y
