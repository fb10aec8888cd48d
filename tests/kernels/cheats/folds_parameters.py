"""Multiplies the parameters out in the first call and never looks at them again."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64))

    def forward(self, x):
        return torch.relu(x) * 2.0 * self.weight


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


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        if "doubled" not in KEPT:
            KEPT["doubled"] = self.weight.detach() * 1.0
        return honest(x) * KEPT["doubled"]


KEPT = {}
