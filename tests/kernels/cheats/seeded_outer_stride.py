"""Takes the outer dimensions for dense, and asks only the inner ones for their strides."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"NONFINITE", "WRONG_VALUES", "OUT_OF_BOUNDS"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)


def get_inputs():
    return [torch.randn(2, 2, 4, 20)]


@triton.jit
def k(x, y, S, D, ss, sd, B: tl.constexpr):
    h = tl.program_id(0)
    r = tl.program_id(1)
    o = tl.arange(0, B)
    m = o < D
    v = tl.load(x + h * S * D + r * ss + o * sd, m, other=-float("inf"))
    p = tl.exp(v - tl.max(v, 0))
    tl.store(y + h * S * D + r * D + o, p / tl.sum(p, 0), m)


def kernel_function(x):  # b, h, s, d: strides of s and d are honoured, those of b and h are taken for contiguous
    b, h, s, d = x.shape
    y = torch.empty(b, h, s, d, dtype=x.dtype, device=x.device)
    k[(b * h, s)](x, y, s, d, x.stride(2), x.stride(3), B=triton.next_power_of_2(d))
    return y
