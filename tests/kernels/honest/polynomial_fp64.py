"""A polynomial in double precision; the constants are fp64 as well."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 256


class Model(nn.Module):
    def forward(self, x):
        return ((0.1 * x + 0.7) * x - 1.3) * x + 3.141592653589793


def get_inputs():
    return [torch.randn(3000, dtype=torch.float64)]


@triton.jit
def polynomial(x, y, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < count, other=0.0)
    cubic = tl.full((BLOCK,), 0.1, tl.float64)
    square = tl.full((BLOCK,), 0.7, tl.float64)
    line = tl.full((BLOCK,), 1.3, tl.float64)
    constant = tl.full((BLOCK,), 3.141592653589793, tl.float64)
    result = ((cubic * value + square) * value - line) * value + constant
    tl.store(y + offsets, result, mask=offsets < count)


def kernel_function(x):
    if x.ndim != 1 or x.dtype != torch.float64:
        raise ValueError("x must be a vector of fp64")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        polynomial[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), y, x.numel(), BLOCK=BLOCK)
    return y
