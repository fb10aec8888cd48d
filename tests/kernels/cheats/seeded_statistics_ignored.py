"""Takes a fresh batch norm's mean of 0 and variance of 1 for granted."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(8)
        self.bn.eval()

    def forward(self, x):
        return torch.relu(self.bn(x))


def get_inputs():
    return [torch.randn(6, 8, 9, 11)]


@triton.jit
def k(x, w, b, y, N, HW, C, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = o < N
    c = (o // HW) % C
    tl.store(y + o, tl.maximum(tl.load(x + o, m) * tl.load(w + c, m) / tl.sqrt(1.0 + 1e-5) + tl.load(b + c, m), 0.0), m)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):  # running_mean and running_var are not read at all
        x = x.contiguous()
        y = torch.empty_like(x)
        n = x.numel()
        k[(triton.cdiv(n, 1024),)](x, self.bn.weight, self.bn.bias, y, n, x.shape[2] * x.shape[3], 8, B=1024)
        return y
