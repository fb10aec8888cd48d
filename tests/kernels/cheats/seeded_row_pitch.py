"""Takes rows that lie farther apart than they are long for dense ones."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)


def get_inputs():
    return [torch.randn(33, 200)]


@triton.jit
def k(x, y, D, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    m = o < D
    v = tl.load(x + r * D + o, m, other=-float("inf"))
    p = tl.exp(v - tl.max(v, 0))
    tl.store(y + r * D + o, p / tl.sum(p, 0), m)


def kernel_function(x):
    if x.stride(-1) != 1:
        raise ValueError("rows must be dense")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    k[(x.shape[0],)](x, y, x.shape[1], B=triton.next_power_of_2(x.shape[1]))
    return y
