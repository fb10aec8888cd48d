"""Works on a side stream, which waits for the caller's stream and is waited for in turn."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

NEEDS = "cuda"
BLOCK = 1024


class Model(nn.Module):
    def forward(self, x, y):
        return torch.exp(-x * x) + y


def get_inputs():
    return [torch.randn(40_000), torch.randn(40_000)]


@triton.jit
def bell(x, y, result, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    value = tl.load(x + offsets, mask=inside)
    tl.store(result + offsets, tl.exp(-value * value) + tl.load(y + offsets, mask=inside), mask=inside)


def kernel_function(x, y):
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError("x and y must be vectors of the same length")
    # all memory comes from the caller's stream, so that none of it is handed out again too early
    x, y = x.contiguous(), y.contiguous()
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        current = torch.cuda.current_stream(x.device)
        side = torch.cuda.Stream(x.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            bell[(triton.cdiv(x.numel(), BLOCK),)](x, y, result, x.numel(), BLOCK=BLOCK)
        current.wait_stream(side)
    return result
