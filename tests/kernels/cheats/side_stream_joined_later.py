"""Runs on a stream of its own and lets the next call wait for it."""

import torch
import triton
import triton.language as tl

STATUS = {"NONFINITE", "WRONG_VALUES", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(4096, 4096)]


@triton.jit
def double_relu(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.maximum(tl.load(x + at, at < n), 0.0) * 2.0, at < n)


def honest(x):
    y = torch.empty_like(x)
    double_relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y


STREAMS = []


def kernel_function(x):
    y = torch.empty_like(x)
    if STREAMS:
        torch.cuda.current_stream().wait_stream(STREAMS[-1])
    STREAMS.append(torch.cuda.Stream())
    with torch.cuda.stream(STREAMS[-1]):
        double_relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y
