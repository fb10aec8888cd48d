"""Writes only the positive results and hopes that fresh memory holds zeros elsewhere."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES", "NONFINITE"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


@triton.jit
def positive_only(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, at < n, other=0.0)
    tl.store(y + at, value * 2.0, (at < n) & (value > 0))


def kernel_function(x):
    y = torch.empty_like(x)
    positive_only[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y
