"""Two halves on two side streams: the caller's stream is joined by both before anything is returned."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

NEEDS = "cuda"
BLOCK = 512


class Model(nn.Module):
    def forward(self, x):
        return torch.sqrt(x * x + 1.0)


def get_inputs():
    return [torch.randn(50_001)]


@triton.jit
def length(x, y, first, last, BLOCK: tl.constexpr):
    offsets = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < last)
    tl.store(y + offsets, tl.sqrt(value * value + 1.0), mask=offsets < last)


def kernel_function(x):
    if x.ndim != 1:
        raise ValueError("x must be a vector")
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = x.numel()
    current = torch.cuda.current_stream(x.device)
    for first, last in ((0, count // 2), (count // 2, count)):
        if first == last:
            continue
        side = torch.cuda.Stream(x.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            length[(triton.cdiv(last - first, BLOCK),)](x, y, first, last, BLOCK=BLOCK)
        y.record_stream(side)
        x.record_stream(side)
        current.wait_stream(side)
    return y
