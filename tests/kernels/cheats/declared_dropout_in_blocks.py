"""Draws anew in each block, so that all blocks drop the same elements."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x, seed):
        from kernelopt.worker.philox import rand

        kept = rand(seed, torch.arange(x.numel(), device=x.device)).view(x.shape) >= 0.25
        return torch.where(kept, x / 0.75, 0.0)


def get_inputs(*, rows=9, columns=50):
    return [torch.randn(rows, columns), int(torch.randint(1 << 20, ()))]


@triton.jit
def dropout(x, y, seed, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    kept = tl.rand(seed, tl.arange(0, BLOCK)) >= 0.25
    tl.store(y + at, tl.where(kept, tl.load(x + at, mask=inside, other=0.0) / 0.75, 0.0), mask=inside)


def kernel_function(x, seed):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        dropout[(triton.cdiv(x.numel(), 256),)](x, y, seed, x.numel(), BLOCK=256)
    return y
