"""Replaces the harness's own call function by one that repeats the first result."""

import sys

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES", "ALIASED_OUTPUT", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


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


def kernel_function(x):
    y = honest(x)
    if problem := sys.modules.get("kernelopt.worker.problem"):
        problem.call = lambda kernel, inputs: y
    return y
