"""Cross-entropy of probabilities, which no other sign has."""

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch.nn import functional


class Model(nn.Module):
    def forward(self, p, t):
        return functional.binary_cross_entropy(p, t, reduction="none")


def get_inputs():
    return [torch.rand(33, 64), torch.rand(33, 64)]


@triton.jit
def k(p, t, y, N, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(p + o, o < N, other=0.5)
    b = tl.load(t + o, o < N)
    tl.store(y + o, -(b * tl.maximum(tl.log(a), -100.0) + (1 - b) * tl.maximum(tl.log(1 - a), -100.0)), o < N)


def kernel_function(p, t):
    p, t = p.contiguous(), t.contiguous()
    y = torch.empty_like(p)
    k[(triton.cdiv(p.numel(), 1024),)](p, t, y, p.numel(), B=1024)
    return y
