"""Normalises its weight in place in each call; that the weight stays so shows in no output."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"INPUT_MUTATED"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x):
        return x * (self.weight / self.weight.norm())


def get_inputs():
    return [torch.randn(33, 64)]


@triton.jit
def scale(x, w, y, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    tl.store(y + r * B + o, tl.load(x + r * B + o) * tl.load(w + o))


class ModelNew(Model):
    def forward(self, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        self.weight.data.div_(self.weight.data.norm())
        scale[(x.shape[0],)](x, self.weight, y, B=64)
        return y
