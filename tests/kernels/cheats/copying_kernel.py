"""Lets torch do the work; its own kernel only copies torch's result."""

import torch
import triton
import triton.language as tl

STATUS = {"CHEAT_SUSPECT"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)


def get_inputs():
    return [torch.randn(64, 1024)]


@triton.jit
def copy(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.load(x + at, at < n), at < n)


def kernel_function(x):
    done = torch.softmax(x, dim=-1)
    y = torch.empty_like(x)
    copy[(triton.cdiv(x.numel(), 1024),)](done, y, x.numel(), block=1024)
    return y
