"""Pads a minimum with 0, which shows where a row holds nothing negative."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x):
        return torch.amin(x, -1)


def get_inputs():
    return [torch.randn(32, 300)]


@triton.jit
def k(x, y, C, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    tl.store(y + r, tl.min(tl.load(x + r * C + o, o < C, other=0.0), 0))


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    k[(x.shape[0],)](x, y, x.shape[1], B=triton.next_power_of_2(x.shape[1]))
    return y
