"""RMSNorm: a program a row, which is read once."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

SHAPES = {"weight": (2048,)}


@triton.jit
def norm(x, weight, out, width, SIZE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    wide = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + 1e-6)
    weights = tl.load(weight + at, mask=at < width, other=0.0)
    tl.store(out + row * width + at, scaled.to(out.dtype.element_ty) * weights, mask=at < width)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SHAPES["weight"]))

    def forward(self, x):
        x, width = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        norm[(x.numel() // width,)](x, self.weight, out, width, SIZE=triton.next_power_of_2(width), num_warps=8)
        return out
