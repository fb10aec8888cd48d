"""GELU with the error function; keeps the memory layout of its input, be it transposed."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 1024


class Model(nn.Module):
    def forward(self, x):
        return nn.functional.gelu(x)


def get_inputs():
    return [torch.randn(64, 77)]


@triton.jit
def gelu(x, y, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < count)
    tl.store(y + offsets, 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476)), mask=offsets < count)


def kernel_function(x):
    layout = torch.contiguous_format if x.is_contiguous() else torch.preserve_format
    y = torch.empty_like(x, memory_format=layout)
    if y.numel():
        if x.stride() != y.stride():
            x = torch.empty_like(y).copy_(x)
        gelu[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y
