"""Row softmax in one pass: a block holds its row in registers, so the matrix is read once and written once."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def softmax_row(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    value = tl.load(x + row * columns + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    numerator = tl.exp(value - tl.max(value, 0))
    result = numerator / tl.sum(numerator, 0)
    tl.store(y + row * columns + offsets, result.to(y.dtype.element_ty), mask=inside)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        x = x.contiguous()
        y = torch.empty_like(x)
        softmax_row[(rows,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
        return y
