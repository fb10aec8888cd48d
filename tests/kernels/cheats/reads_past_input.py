"""Reads past the end of the input and multiplies what it finds by zero."""

import torch
import triton
import triton.language as tl

STATUS = {"OUT_OF_BOUNDS", "ILLEGAL_ACCESS", "NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return x.sum(dim=-1)


def get_inputs():
    return [torch.randn(33, 60)]


@triton.jit
def row_sums(x, y, n, block: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, block)
    tl.store(y + row, tl.sum(tl.load(x + row * n + at) * (at < n).to(tl.float32), axis=0))


def kernel_function(x):
    y = torch.empty(x.shape[0], device=x.device)
    row_sums[(x.shape[0],)](x, y, x.shape[1], block=64)
    return y
