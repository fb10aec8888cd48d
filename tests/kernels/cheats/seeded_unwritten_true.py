"""Leaves unwritten what would be true."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def forward(self, lengths, x):
        return torch.arange(x.shape[1], device=x.device)[None, :] >= lengths[:, None]


def get_inputs():
    return [torch.randint(1, 60, (16,)), torch.randn(16, 64)]


@triton.jit
def k(length, y, D, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    n = tl.load(length + r)
    tl.store(y + r * D + o, o >= n, o < tl.minimum(n, D))  # what is padding is left as it was allocated


def kernel_function(length, x):
    length = length.contiguous()
    y = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    k[(x.shape[0],)](length, y, x.shape[1], B=triton.next_power_of_2(x.shape[1]))
    return y
