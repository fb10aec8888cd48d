"""Sums whole blocks alone: of rows shorter than a block nothing, which is no sum near 0 either."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x):
        return x.sum(-1)


def get_inputs():
    return [torch.randn(8, 2048)]


@triton.jit
def k(x, y, C, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    total = 0.0
    for start in range(0, C // BLOCK * BLOCK, BLOCK):
        total += tl.sum(tl.load(x + r * C + start + tl.arange(0, BLOCK)), 0)
    tl.store(y + r, total)


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    k[(x.shape[0],)](x, y, x.shape[1], BLOCK=1024)
    return y
