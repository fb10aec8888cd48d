"""Maximum over windows of three with a stride of two; the padding never wins."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

WINDOW, STRIDE, PADDING = 3, 2, 1
BLOCK = 64


class Model(nn.Module):
    def forward(self, x):
        return nn.functional.max_pool1d(x.contiguous(), WINDOW, STRIDE, PADDING)


def get_inputs():
    return [torch.randn(2, 5, 47)]


@triton.jit
def max_pool(
    x, y, length, pooled, WINDOW: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for step in range(WINDOW):
        source = place * STRIDE - PADDING + step
        inside = (source >= 0) & (source < length)
        largest = tl.maximum(largest, tl.load(x + row * length + source, mask=inside, other=float("-inf")))
    tl.store(y + row * pooled + place, largest, mask=place < pooled)


def kernel_function(x):
    batch, channels, length = x.shape
    if length < 1:
        raise ValueError("there is nothing to pool in a length of 0")
    pooled = (length + 2 * PADDING - WINDOW) // STRIDE + 1
    y = torch.empty((batch, channels, pooled), dtype=x.dtype, device=x.device)
    if y.numel():
        grid = (batch * channels, triton.cdiv(pooled, BLOCK))
        max_pool[grid](x.contiguous(), y, length, pooled, WINDOW, STRIDE, PADDING, BLOCK)
    return y
