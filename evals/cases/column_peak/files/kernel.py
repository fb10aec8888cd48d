"""Largest absolute value of each column: a program takes a column and walks down it."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def column_peak(x, y, rows, columns, block: tl.constexpr):
    column = tl.program_id(0)
    peak = tl.zeros((block,), tl.float32)
    for start in range(0, rows, block):
        at = start + tl.arange(0, block)
        value = tl.load(x + at.to(tl.int64) * columns + column, mask=at < rows, other=0.0)
        peak = tl.maximum(peak, tl.abs(value))
    tl.store(y + column, tl.max(peak, 0))


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 2 or x.dtype != torch.float32:
            raise ValueError("a float32 matrix")
        rows, columns = x.shape
        x = x.contiguous()
        y = torch.empty(columns, dtype=x.dtype, device=x.device)
        column_peak[(columns,)](x, y, rows, columns, block=1024)
        return y
