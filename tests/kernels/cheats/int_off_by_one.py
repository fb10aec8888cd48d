"""One integer of many is wrong by one."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2


def get_inputs():
    return [torch.randint(-1000, 1000, (33, 64), dtype=torch.int32)]


@triton.jit
def double_relu(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.maximum(tl.load(x + at, at < n), 0) * 2, at < n)


def honest(x):
    y = torch.empty_like(x)
    double_relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y


def kernel_function(x):
    y = honest(x)
    y[20, 40] += 1
    return y
