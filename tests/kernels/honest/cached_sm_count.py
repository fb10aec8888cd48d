"""Keeps one thing between calls: the number of multiprocessors, which the grid is sized by."""

import functools

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 512


class Model(nn.Module):
    def forward(self, x):
        return torch.abs(x) + 0.5


def get_inputs():
    return [torch.randn(8009)]


@functools.cache
def multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit
def shift(x, y, count, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < count)
        tl.store(y + offsets, tl.abs(value) + 0.5, mask=offsets < count)


def kernel_function(x):
    if x.ndim != 1:
        raise ValueError("x must be a vector")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        programs = min(triton.cdiv(x.numel(), BLOCK), 2 * multiprocessors(x.device))
        shift[(programs,)](x.contiguous(), y, x.numel(), BLOCK=BLOCK)
    return y
