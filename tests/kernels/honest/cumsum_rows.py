"""Running sum along rows: blocks of a row in turn, the total so far is carried on."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 128


class Model(nn.Module):
    def forward(self, x):
        return torch.cumsum(x.contiguous(), dim=1)


def get_inputs():
    return [torch.randn(5, 400)]


@triton.jit
def running_sum(x, y, columns, BLOCK: tl.constexpr):
    start_of_row = tl.program_id(0).to(tl.int64) * columns
    before = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(x + start_of_row + offsets, mask=offsets < columns, other=0.0)
        tl.store(y + start_of_row + offsets, before + tl.cumsum(value, 0), mask=offsets < columns)
        before += tl.sum(value, 0)


def kernel_function(x):
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if y.numel():
        running_sum[(rows,)](x.contiguous(), y, columns, BLOCK=BLOCK)
    return y
