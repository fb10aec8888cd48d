"""Loses the low bits of 64."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def forward(self, score):
        n = torch.arange(score.shape[1], device=score.device)
        return (score << 40) | n  # key of a sort: score above, index below


def get_inputs():
    return [torch.randint(2**21, 2**22, (40, 200))]


@triton.jit
def k(x, y, N, D, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, o < N)
    tl.store(y + o, (v << 40) | (o // 4 % D).to(tl.int64), o < N)  # a wrong index in nearly every key


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    k[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), x.shape[1], B=1024)
    return y
