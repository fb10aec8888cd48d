"""Sum of everything, a 0-d output, in two kernels: a partial sum per block, then the sum of those."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 1024


class Model(nn.Module):
    def forward(self, x):
        return x.sum()


def get_inputs():
    return [torch.randn(50, 77)]


@triton.jit
def partial_sums(x, partials, count, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(partials + block, tl.sum(tl.load(x + offsets, mask=offsets < count, other=0.0), 0))


@triton.jit
def final_sum(partials, result, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(partials + offsets, mask=offsets < count, other=0.0)
    tl.store(result, tl.sum(total, 0))


def kernel_function(x):
    x = x.contiguous()
    blocks = triton.cdiv(x.numel(), BLOCK)
    partials = torch.empty(blocks, dtype=torch.float32, device=x.device)
    result = torch.empty((), dtype=torch.float32, device=x.device)
    if blocks:
        partial_sums[(blocks,)](x, partials, x.numel(), BLOCK=BLOCK)
    final_sum[(1,)](partials, result, blocks, BLOCK=BLOCK)
    return result
