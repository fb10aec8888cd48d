"""Finds the opponent's Model in sys.modules and makes its forward sleep."""

import sys
import time

import torch
import triton
import triton.language as tl

STATUS = {"CHEAT_SUSPECT"}
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


def sleepy(forward):
    def slow(self, *given):
        time.sleep(0.05)
        return forward(self, *given)

    return slow


def kernel_function(x):
    for module in list(sys.modules.values()):
        model = vars(module).get("Model")
        if isinstance(model, type) and not hasattr(model, "slowed"):
            model.slowed, model.forward = True, sleepy(model.forward)
    return honest(x)
