"""Mean and variance of each row: a tuple of two outputs of one kernel."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

LONGEST = 65536


class Model(nn.Module):
    def forward(self, x):
        return x.mean(dim=1), x.var(dim=1, correction=0)


def get_inputs():
    return [torch.randn(7, 513) * 2 + 1]


@triton.jit
def moments(x, means, variances, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    value = tl.load(x + row * columns + offsets, mask=inside, other=0.0)
    mean = tl.sum(value, 0) / columns
    centred = tl.where(inside, value - mean, 0.0)
    tl.store(means + row, mean)
    tl.store(variances + row, tl.sum(centred * centred, 0) / columns)


def kernel_function(x):
    rows, columns = x.shape
    if not 0 < columns <= LONGEST:
        raise ValueError(f"a row must have 1 to {LONGEST} elements, not {columns}")
    means, variances = (torch.empty(rows, dtype=x.dtype, device=x.device) for _ in range(2))
    if rows:
        moments[(rows,)](x.contiguous(), means, variances, columns, BLOCK=triton.next_power_of_2(columns))
    return means, variances
