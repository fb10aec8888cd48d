"""Row sum with atomics: several blocks add to the same element, in whatever order they come."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 128


class Model(nn.Module):
    def forward(self, x):
        return x.sum(dim=1)


def get_inputs():
    return [torch.randn(5, 700)]


@triton.jit
def add_to_row(x, sums, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + offsets, mask=offsets < columns, other=0.0)
    tl.atomic_add(sums + row, tl.sum(value, 0))


def kernel_function(x):
    rows, columns = x.shape
    sums = torch.zeros(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        add_to_row[(rows, triton.cdiv(columns, BLOCK))](x.contiguous(), sums, columns, BLOCK=BLOCK)
    return sums
