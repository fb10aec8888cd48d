"""Writes one element just past the end of the input."""

import torch
import triton
import triton.language as tl

STATUS = {"OUT_OF_BOUNDS", "ILLEGAL_ACCESS"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


@triton.jit
def stray(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.maximum(tl.load(x + at, at < n), 0.0) * 2.0, at < n)
    if tl.program_id(0) == 0:
        tl.store(x + n, 7.0)


def kernel_function(x):
    y = torch.empty_like(x)
    stray[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y
