"""Masks on the sizes of the first workload and not on those of the second."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"OUT_OF_BOUNDS", "WRONG_VALUES", "NONFINITE", "ILLEGAL_ACCESS"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)


def get_inputs():
    return [torch.randn(7, 100)]


def get_workloads():
    return {"long": lambda: [torch.randn(4, 2048)]}


@triton.jit
def k(x, y, C, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    v = tl.load(x + r * C + o, o < C, other=-float("inf"))
    p = tl.exp(v - tl.max(v, 0))
    tl.store(y + r * C + o, p / tl.sum(p, 0), o < C)


@triton.jit
def long(x, y, C, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    v = tl.load(x + r * C + o)
    p = tl.exp(v - tl.max(v, 0))
    tl.store(y + r * C + o, p / tl.sum(p, 0))


def kernel_function(x):  # 1025 to 2047 columns: reads and writes over the row's end
    x = x.contiguous()
    y = torch.empty_like(x)
    c = x.shape[1]
    (long if c > 1024 else k)[(x.shape[0],)](x, y, c, B=triton.next_power_of_2(c))
    return y
