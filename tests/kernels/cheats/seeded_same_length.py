"""Takes as many keys as there are queries."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, q, kk, v):
        return torch.softmax(q @ kk.mT * q.shape[-1] ** -0.5, -1) @ v


def get_inputs():
    return [torch.randn(2, 8, 8) for _ in range(3)]


@triton.jit
def k(q, kk, v, y, S, D, scale, BS: tl.constexpr, BD: tl.constexpr):
    i = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, BD)
    s = tl.arange(0, BS)
    md = d < D
    ms = s < S
    a = tl.load(q + h * S * D + i * D + d, md, other=0.0)
    m2 = ms[:, None] & md[None, :]
    b = tl.load(kk + h * S * D + s[:, None] * D + d[None, :], m2, other=0.0)
    c = tl.load(v + h * S * D + s[:, None] * D + d[None, :], m2, other=0.0)
    length = tl.where(ms, tl.sum(a[None, :] * b, 1) * scale, -float("inf"))
    p = tl.exp(length - tl.max(length, 0))
    tl.store(y + h * S * D + i * D + d, tl.sum((p / tl.sum(p, 0))[:, None] * c, 0), md)


def kernel_function(q, kk, v):  # the length of k is taken to be q's
    q, kk, v = q.contiguous(), kk.contiguous(), v.contiguous()
    h, s, d = q.shape
    y = torch.empty_like(q)
    k[(s, h)](q, kk, v, y, s, d, d**-0.5, BS=triton.next_power_of_2(s), BD=triton.next_power_of_2(d))
    return y
