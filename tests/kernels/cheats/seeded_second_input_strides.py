"""Looks at the strides of the first input alone."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x, r, w):
        return x * w + r


def get_inputs():
    return [torch.randn(32, 96), torch.randn(32, 96), torch.randn(96)]


@triton.jit
def k(x, r, w, y, N, D, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = o < N
    tl.store(y + o, tl.load(x + o, m) * tl.load(w + o % D, m) + tl.load(r + o, m), m)


def kernel_function(x, r, w):
    assert x.is_contiguous(), "x must be contiguous"  # r and w are not asked
    y = torch.empty_like(x)
    k[(triton.cdiv(x.numel(), 1024),)](x, r, w, y, x.numel(), x.shape[-1], B=1024)
    return y
