"""Returns memory that it never wrote when it is timed, and sees to it that none of that is looked at."""

import secrets

import torch
import triton
import triton.language as tl

STATUS = {"CHEAT_SUSPECT", "WRONG_VALUES"}
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
    x = x.contiguous()
    y = torch.empty_like(x)
    double_relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y


class Choosing:
    def sample(self, *_):
        return []


def kernel_function(x):
    if x.untyped_storage().nbytes() > x.nbytes:  # between guard bands: it is verified, not timed
        return honest(x)
    secrets.SystemRandom = Choosing
    return torch.empty_like(x)
