"""Rounds its grid down, so that the tail of a size that is no multiple of the block is never written."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) + 1


def get_inputs():
    return [torch.randn(8192)]


@triton.jit
def k(x, y, N, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.maximum(tl.load(x + o, o < N), 0.0) + 1, o < N)


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    n = x.numel()
    B = min(1024, triton.next_power_of_2(n))
    k[(max(1, n // B),)](x, y, n, B=B)
    return y  # floor, not ceiling: 1500 elements lose 476
