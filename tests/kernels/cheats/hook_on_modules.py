"""Slows every module of torch down, and with them the reference that it is compared with."""

import time

import torch
import triton
import triton.language as tl

STATUS = {"CHEAT_SUSPECT"}
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
    x = x.contiguous()
    y = torch.empty_like(x)
    double_relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y


def slowly(module, arguments):
    if type(module).__name__ == "Model":
        time.sleep(0.001)


torch.nn.modules.module.register_module_forward_pre_hook(slowly)


def kernel_function(x):
    return honest(x)
