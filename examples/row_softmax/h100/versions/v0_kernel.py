"""Row softmax, naive: three kernels, each of which reads the whole matrix again."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def row_max(x, result, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + offsets, mask=offsets < columns, other=float("-inf"))
        largest = tl.maximum(largest, value.to(tl.float32))
    tl.store(result + row, tl.max(largest, 0))


@triton.jit
def row_sum(x, maxima, result, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(maxima + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + offsets, mask=offsets < columns, other=float("-inf"))
        total += tl.exp(value.to(tl.float32) - largest)
    tl.store(result + row, tl.sum(total, 0))


@triton.jit
def normalise(x, maxima, sums, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest, total = tl.load(maxima + row), tl.load(sums + row)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        value = tl.load(x + row * columns + offsets, mask=inside)
        result = tl.exp(value.to(tl.float32) - largest) / total
        tl.store(y + row * columns + offsets, result.to(y.dtype.element_ty), mask=inside)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        x = x.contiguous()
        y = torch.empty_like(x)
        maxima, sums = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        row_max[(rows,)](x, maxima, columns, BLOCK=BLOCK)
        row_sum[(rows,)](x, maxima, sums, columns, BLOCK=BLOCK)
        normalise[(rows,)](x, maxima, sums, y, columns, BLOCK=BLOCK)
        return y
