"""Leaves unwritten what would be -1."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def forward(self, x):
        hit = x > 1.5
        return torch.where(hit.any(-1), hit.int().argmax(-1), -1)


def get_inputs():
    return [torch.randn(200, 12)]


@triton.jit
def k(x, y, D, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    v = tl.load(x + r * D + o, o < D, other=0.0)
    i = tl.min(tl.where((v > 1.5) & (o < D), o, 1 << 20), 0)
    tl.store(y + r, i.to(tl.int64), i < D)  # rows without a hit are never written


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    k[(x.shape[0],)](x, y, x.shape[1], B=triton.next_power_of_2(x.shape[1]))
    return y
