"""Takes a Python number and a boolean mask besides the tensor: not every input is a floating tensor."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 512


class Model(nn.Module):
    def forward(self, x, keep, scale):
        return torch.where(keep, x * scale, -x)


def get_inputs():
    return [torch.randn(5000), torch.randint(0, 2, (5000,)) > 0, 1.75]


@triton.jit
def select(x, keep, result, count, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    value = tl.load(x + offsets, mask=inside)
    kept = tl.load(keep + offsets, mask=inside) != 0
    tl.store(result + offsets, tl.where(kept, value * scale, -value), mask=inside)


def kernel_function(x, keep, scale):
    if x.ndim != 1 or x.shape != keep.shape or keep.dtype != torch.bool:
        raise ValueError("x and keep must be vectors of the same length, and keep boolean")
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        flags = keep.contiguous().view(torch.uint8)
        select[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), flags, result, x.numel(), scale, BLOCK=BLOCK)
    return result
