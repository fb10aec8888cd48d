"""Autotuned over several block sizes: the first call of a size writes the output many times."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


class Model(nn.Module):
    def forward(self, x):
        return x.sum(dim=1)


def get_inputs():
    return [torch.randn(5, 2000)]


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((128, 2), (512, 4), (2048, 8))],
    key=["columns"],
)
@triton.jit
def row_sum(x, sums, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * columns + offsets, mask=offsets < columns, other=0.0)
    tl.store(sums + row, tl.sum(total, 0))


def kernel_function(x):
    rows, columns = x.shape
    sums = torch.empty(rows, dtype=x.dtype, device=x.device)
    if rows:
        row_sum[(rows,)](x.contiguous(), sums, columns)
    return sums
