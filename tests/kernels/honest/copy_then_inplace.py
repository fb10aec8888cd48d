"""Looks as if it worked in place: one kernel copies the input, another one changes the copy."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 512


class Model(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * x


def get_inputs():
    return [torch.randn(3001)]


@triton.jit
def copy(x, y, count, stride, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets * stride, mask=offsets < count), mask=offsets < count)


@triton.jit
def silu_in_place(y, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(y + offsets, mask=offsets < count)
    tl.store(y + offsets, value / (1.0 + tl.exp(-value)), mask=offsets < count)


def kernel_function(x):
    if x.ndim != 1:
        raise ValueError("x must be a vector")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    count = x.numel()
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        copy[grid](x, y, count, x.stride(0), BLOCK=BLOCK)
        silu_in_place[grid](y, count, BLOCK=BLOCK)
    return y
