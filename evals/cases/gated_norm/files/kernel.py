"""Gated RMS norm: three kernels, with the gated rows in memory between them."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def gate_rows(x, gate, gated, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        inside = at < columns
        value = tl.load(x + row * columns + at, mask=inside, other=0.0)
        weight = tl.load(gate + row * columns + at, mask=inside, other=0.0)
        tl.store(gated + row * columns + at, value * weight * tl.sigmoid(weight), mask=inside)


@triton.jit
def scale_of_rows(gated, scale, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        value = tl.load(gated + row * columns + at, mask=at < columns, other=0.0)
        total += value * value
    tl.store(scale + row, 1.0 / tl.sqrt(tl.sum(total, 0) / columns + 1e-6))


@triton.jit
def scale_rows(gated, scale, y, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        inside = at < columns
        value = tl.load(gated + row * columns + at, mask=inside, other=0.0)
        tl.store(y + row * columns + at, value * factor, mask=inside)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if x.ndim != 2 or x.shape != gate.shape or x.dtype != torch.float32 or gate.dtype != torch.float32:
            raise ValueError("two float32 matrices of one shape")
        rows, columns = x.shape
        x, gate = x.contiguous(), gate.contiguous()
        gated, y = torch.empty_like(x), torch.empty_like(x)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        gate_rows[(rows,)](x, gate, gated, columns, block=1024)
        scale_of_rows[(rows,)](gated, scale, columns, block=1024)
        scale_rows[(rows,)](gated, scale, y, columns, block=1024)
        return y
