"""Ignores a mask that is all true in the task."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x, mask):
        return torch.softmax(x.masked_fill(~mask, float("-inf")), -1)


def get_inputs():
    return [torch.randn(9, 200), torch.ones(9, 200, dtype=torch.bool)]


@triton.jit
def k(x, y, D, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    m = o < D
    v = tl.load(x + r * D + o, m, other=-float("inf"))
    p = tl.exp(v - tl.max(v, 0))
    tl.store(y + r * D + o, p / tl.sum(p, 0), m)


def kernel_function(x, mask):
    x = x.contiguous()
    y = torch.empty_like(x)
    k[(x.shape[0],)](x, y, x.shape[1], B=triton.next_power_of_2(x.shape[1]))
    return y
