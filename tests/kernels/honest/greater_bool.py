"""Comparison of two vectors: boolean output, written as bytes."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 1024


class Model(nn.Module):
    def forward(self, x, y):
        return x > y


def get_inputs():
    return [torch.randn(7001), torch.randn(7001)]


@triton.jit
def greater(x, y, result, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    is_greater = tl.load(x + offsets, mask=inside) > tl.load(y + offsets, mask=inside)
    tl.store(result + offsets, is_greater.to(tl.uint8), mask=inside)


def kernel_function(x, y):
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError("x and y must be vectors of the same length")
    result = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        greater[grid](x.contiguous(), y.contiguous(), result.view(torch.uint8), x.numel(), BLOCK=BLOCK)
    return result
