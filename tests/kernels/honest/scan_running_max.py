"""Running maximum along rows with tl.associative_scan and an own combining function."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

LONGEST = 16384


class Model(nn.Module):
    def forward(self, x):
        return torch.cummax(x.contiguous(), dim=1).values


def get_inputs():
    return [torch.randn(5, 250)]


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_max(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + offsets, mask=offsets < columns, other=float("-inf"))
    tl.store(y + row * columns + offsets, tl.associative_scan(value, 0, larger), mask=offsets < columns)


def kernel_function(x):
    rows, columns = x.shape
    if columns > LONGEST:
        raise ValueError(f"a row of {columns} elements does not fit into one block of {LONGEST}")
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if y.numel():
        running_max[(rows,)](x.contiguous(), y, columns, BLOCK=triton.next_power_of_2(columns))
    return y
