"""No mask on the classes, which the targets index."""

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch.nn import functional

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x, t):
        return functional.cross_entropy(x, t, reduction="none")


def get_inputs():
    return [torch.randn(8, 1024), torch.randint(0, 1024, (8,))]


@triton.jit
def k(x, t, y, C, B: tl.constexpr):
    r = tl.program_id(0)
    m = -float("inf")
    s = 0.0
    for c in range(0, C // B * B, B):  # the last C % B classes are never read
        v = tl.load(x + r * C + c + tl.arange(0, B))
        n = tl.maximum(m, tl.max(v, 0))
        s = s * tl.exp(m - n) + tl.sum(tl.exp(v - n), 0)
        m = n
    i = tl.load(t + r)
    tl.store(y + r, m + tl.log(s) - tl.load(x + r * C + i))


def kernel_function(x, t):
    x, t = x.contiguous(), t.contiguous()
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    k[(x.shape[0],)](x, t, y, x.shape[1], B=256)
    return y
