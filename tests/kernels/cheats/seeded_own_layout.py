"""Right on dense inputs
the task's own are halves of something larger."""

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch.nn import functional

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def forward(self, a, b):
        return functional.silu(a) * b


def get_inputs():
    return list(torch.randn(32, 192).chunk(2, -1))  # halves of one projection: row pitch 192


@triton.jit
def k(a, b, y, D, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    m = o < D
    v = tl.load(a + r * D + o, m)
    w = tl.load(b + r * D + o, m)
    tl.store(y + r * D + o, v / (1 + tl.exp(-v)) * w, m)


def kernel_function(a, b):
    assert a.stride(-1) == 1 and b.stride(-1) == 1
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    k[(a.shape[0],)](a, b, y, a.shape[1], B=triton.next_power_of_2(a.shape[1]))
    return y
