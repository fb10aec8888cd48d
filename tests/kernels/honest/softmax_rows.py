"""Row softmax: one block holds one row."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

LONGEST = 65536


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x.contiguous(), dim=-1)


def get_inputs():
    return [torch.randn(7, 301)]


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    value = tl.load(x + row * columns + offsets, mask=inside, other=float("-inf"))
    power = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * columns + offsets, power / tl.sum(power, 0), mask=inside)


def kernel_function(x):
    rows, columns = x.shape
    if columns > LONGEST:
        raise ValueError(f"a row of {columns} elements does not fit into one block of {LONGEST}")
    x = x.contiguous()
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if y.numel():
        softmax[(rows,)](x, y, columns, BLOCK=triton.next_power_of_2(columns))
    return y
