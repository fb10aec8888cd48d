"""RMSNorm of bf16 rows: the squares are summed in fp32."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

EPSILON = 1e-5
BLOCK = 256


class Model(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, dtype=torch.bfloat16))

    def forward(self, x):
        return nn.functional.rms_norm(x.contiguous(), self.weight.shape, self.weight, EPSILON)


def get_inputs():
    return [torch.randn(5, 700, dtype=torch.bfloat16)]


def get_init_inputs():
    return [700]


@triton.jit
def rms_norm(x, weight, y, columns, epsilon, BLOCK: tl.constexpr):
    start_of_row = tl.program_id(0).to(tl.int64) * columns
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(x + start_of_row + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
        squares += value * value
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / columns + epsilon)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        value = tl.load(x + start_of_row + offsets, mask=inside).to(tl.float32)
        gain = tl.load(weight + offsets, mask=inside).to(tl.float32)
        tl.store(y + start_of_row + offsets, (value * factor * gain).to(y.dtype.element_ty), mask=inside)


class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, dtype=torch.bfloat16))

    def forward(self, x):
        rows, columns = x.shape
        if columns != self.weight.numel():
            raise ValueError(f"x has {columns} columns, the weight has {self.weight.numel()}")
        y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        if y.numel():
            rms_norm[(rows,)](x.contiguous(), self.weight.contiguous(), y, columns, EPSILON, BLOCK=BLOCK)
        return y
