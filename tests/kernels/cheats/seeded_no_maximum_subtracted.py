"""A softmax that overflows where the scores are large."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)


def get_inputs():
    return [torch.randn(32, 300)]


@triton.jit
def k(x, y, C, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    p = tl.exp(tl.load(x + r * C + o, o < C, other=-float("inf")))
    tl.store(y + r * C + o, p / tl.sum(p, 0), o < C)


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    k[(x.shape[0],)](x, y, x.shape[1], B=triton.next_power_of_2(x.shape[1]))
    return y
