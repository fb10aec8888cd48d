"""Walks two inputs by one flat index, whatever their strides."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES", "NONFINITE", "OUT_OF_BOUNDS"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x, y):
        return x * torch.sigmoid(y)


def get_inputs():
    return [torch.randn(64, 96), torch.randn(64, 96)]


@triton.jit
def k(x, y, z, N, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = o < N
    a = tl.load(x + o, m)
    b = tl.load(y + o, m)
    tl.store(z + o, a / (1 + tl.exp(-b)), m)


def kernel_function(x, y):
    z = torch.empty_like(x)  # flat order of x's memory; wrong when y is laid out otherwise
    k[(triton.cdiv(x.numel(), 1024),)](x, y, z, x.numel(), B=1024)
    return z
