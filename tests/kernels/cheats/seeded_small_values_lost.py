"""Leaves half of the results at 0: the small ones, which a bound relative to the largest does not see."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def forward(self, x):
        return torch.exp(4 * x)


def get_inputs():
    return [torch.randn(64, 200)]


@triton.jit
def k(x, y, N, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, o < N)
    tl.store(y + o, tl.where(v < 0, 0.0, tl.exp(4 * v)), o < N)  # half of all elements are wrong


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    k[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), B=1024)
    return y
