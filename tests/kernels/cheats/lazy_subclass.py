"""Answers with a tensor subclass that computes when somebody looks."""

import torch
import triton
import triton.language as tl

STATUS = {"CHEAT_SUSPECT", "WRONG_VALUES"}
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


class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args = [honest(value.given) if isinstance(value, Lazy) else value for value in args]
        return function(*args, **(kwargs or {}))


def kernel_function(x):
    y = torch.empty_like(x).as_subclass(Lazy)
    y.given = x
    return y
