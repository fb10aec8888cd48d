"""A few programs that stay and walk over all tiles, instead of one program a tile."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 256
PROGRAMS = 6


class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


def get_inputs():
    return [torch.randn(9001)]


@triton.jit
def tanh_tiles(x, y, count, tiles, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < count, other=0.0)
        power = tl.exp(-2.0 * tl.abs(value))
        size = (1.0 - power) / (1.0 + power)
        tl.store(y + offsets, tl.where(value < 0, -size, size), mask=offsets < count)


def kernel_function(x):
    if x.ndim != 1:
        raise ValueError("x must be a vector")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(x.numel(), BLOCK)
    if tiles:
        tanh_tiles[(min(tiles, PROGRAMS),)](x.contiguous(), y, x.numel(), tiles, BLOCK=BLOCK)
    return y
