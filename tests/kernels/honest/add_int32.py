"""Sum of two int32 vectors: wraps around where it overflows."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 512


class Model(nn.Module):
    def forward(self, x, y):
        return x + y


def get_inputs():
    return [torch.randint(-(2**31), 2**31 - 1, (6007,), dtype=torch.int32) for _ in range(2)]


@triton.jit
def add(x, y, result, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside)
    tl.store(result + offsets, total, mask=inside)


def kernel_function(x, y):
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError("x and y must be vectors of the same length")
    result = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    if x.numel():
        add[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), y.contiguous(), result, x.numel(), BLOCK=BLOCK)
    return result
