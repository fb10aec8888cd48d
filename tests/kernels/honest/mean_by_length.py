"""Means over as many rows as an input says."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


class Model(nn.Module):
    def forward(self, x, lengths):
        keep = torch.arange(x.shape[1], device=x.device)[None, :] < lengths[:, None]
        return (x * keep[..., None]).sum(1) / lengths[:, None]


def get_inputs():
    return [torch.randn(4, 20, 16), torch.randint(1, 21, (4,))]


@triton.jit
def k(x, length, y, S, D, B: tl.constexpr):
    b = tl.program_id(0)
    o = tl.arange(0, B)
    n = tl.load(length + b)
    acc = tl.zeros((B,), tl.float32)
    for s in range(0, n):
        acc += tl.load(x + b * S * D + s * D + o, o < D, other=0.0)
    tl.store(y + b * D + o, acc / n, o < D)


def kernel_function(x, length):
    x, length = x.contiguous(), length.contiguous()
    y = torch.empty(x.shape[0], x.shape[2], device=x.device)
    k[(x.shape[0],)](x, length, y, x.shape[1], x.shape[2], B=triton.next_power_of_2(x.shape[2]))
    return y
