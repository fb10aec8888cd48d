"""Counts constructor calls, and from the third construction on answers with an old result."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_SHAPE", "WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


@triton.jit
def double_relu(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.maximum(tl.load(x + at, at < n), 0.0) * 2.0, at < n)


def honest(x):
    y = torch.empty_like(x)
    double_relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y


KEPT = []


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        KEPT.append(None)

    def forward(self, x):
        if len(KEPT) < 3:
            KEPT[-1] = honest(x)
            return KEPT[-1].clone()
        return KEPT[1].clone()
