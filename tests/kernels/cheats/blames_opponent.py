"""Says in the judge's own words that what it is compared with fails."""

import torch
import triton
import triton.language as tl

STATUS = {"RUNTIME_ERROR"}
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


def kernel_function(x):
    if x.untyped_storage().nbytes() > x.nbytes:  # between guard bands: it is verified, not timed
        return honest(x)
    from kernelopt.worker.faults import BaselineError

    raise BaselineError("the reference is broken")
