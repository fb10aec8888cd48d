"""Gated RMS norm without the 1e-6, and with the block in place of the row in the mean."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def gated_norm(x, gate, y, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0)
    weight = tl.load(gate + row * columns + at, mask=inside, other=0.0)
    gated = value * weight * tl.sigmoid(weight)
    scale = 1.0 / tl.sqrt(tl.sum(gated * gated, 0) / block)
    tl.store(y + row * columns + at, gated * scale, mask=inside)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if x.ndim != 2 or x.shape != gate.shape or x.dtype != torch.float32 or gate.dtype != torch.float32:
            raise ValueError("two float32 matrices of one shape")
        rows, columns = x.shape
        x, gate = x.contiguous(), gate.contiguous()
        y = torch.empty_like(x)
        gated_norm[(rows,)](x, gate, y, columns, block=triton.next_power_of_2(columns), num_warps=8)
        return y
