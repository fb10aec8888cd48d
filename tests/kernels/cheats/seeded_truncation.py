"""Rounds towards 0 where the reference rounds down."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x):
        return torch.floor(x * 127).to(torch.int32)


def get_inputs():
    return [torch.rand(33, 64)]


@triton.jit
def k(x, y, N, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, (tl.load(x + o, o < N) * 127).to(tl.int32), o < N)


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    k[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), B=1024)
    return y
