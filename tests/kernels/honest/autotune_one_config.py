"""Autotuned with a single configuration: nothing to measure, the block size still comes from it."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


class Model(nn.Module):
    def forward(self, x, y):
        return x * y + x


def get_inputs():
    return [torch.randn(4001), torch.randn(4001)]


@triton.autotune(configs=[triton.Config({"BLOCK": 256}, num_warps=4)], key=["count"])
@triton.jit
def multiply_add(x, y, result, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    left = tl.load(x + offsets, mask=inside)
    right = tl.load(y + offsets, mask=inside)
    tl.store(result + offsets, left * right + left, mask=inside)


def kernel_function(x, y):
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError("x and y must be vectors of the same length")
    count = x.numel()
    result = torch.empty(count, dtype=x.dtype, device=x.device)
    if count:
        multiply_add[lambda meta: (triton.cdiv(count, meta["BLOCK"]),)](x.contiguous(), y.contiguous(), result, count)
    return result
