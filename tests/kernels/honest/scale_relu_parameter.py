"""A scale per column, a learned parameter, and ReLU in one kernel; reads any two strides, writes contiguous rows."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 256


class Model(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(columns))

    def forward(self, x):
        return torch.relu(x * self.scale).contiguous()


def get_inputs():
    return [torch.randn(7, 300)]


def get_init_inputs():
    return [300]


@triton.jit
def scale_relu(x, scale, y, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    value = tl.load(x + row * row_stride + offsets * column_stride, mask=inside)
    factor = tl.load(scale + offsets, mask=inside)
    tl.store(y + row * columns + offsets, tl.maximum(value * factor, 0.0), mask=inside)


class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(columns))

    def forward(self, x):
        rows, columns = x.shape
        if columns != self.scale.numel():
            raise ValueError(f"x has {columns} columns, the scale has {self.scale.numel()}")
        y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        if y.numel():
            grid = (rows, triton.cdiv(columns, BLOCK))
            scale_relu[grid](x, self.scale.contiguous(), y, columns, x.stride(0), x.stride(1), BLOCK=BLOCK)
        return y
