"""Answers with views of one large buffer that every call overwrites."""

import torch
import triton
import triton.language as tl

STATUS = {"ALIASED_OUTPUT"}
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


BUFFER = {}


def kernel_function(x):
    if x.device not in BUFFER:
        BUFFER[x.device] = torch.empty(1 << 20, device=x.device)
    y = BUFFER[x.device][: x.numel()].view(x.shape)
    return y.copy_(honest(x))
