"""Repeats its last result when the benchmarking module has been imported."""

import sys

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES", "CHEAT_SUSPECT"}
CAUGHT_BY = "timing"


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


KEPT = {}


def timed():
    return "triton.testing" in sys.modules and sys._getframe(3).f_code.co_name != "run_case"


def kernel_function(x):
    if "y" not in KEPT or KEPT["y"].shape != x.shape or not timed():
        KEPT["y"] = honest(x)
    return KEPT["y"].clone()
