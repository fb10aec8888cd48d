"""RMSNorm over dim 1: one read, all channels of 256 positions are a tile in the registers of 8 warps."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 1024
ELEMENTS, WARPS = 16384, 8  # of a tile: for 64 channels 256 positions


@triton.jit
def normalise_in_two_passes(x, y, tiles, channels, positions, eps, BLOCK: tl.constexpr):
    """BLOCK positions of one image: one pass over the channels for the squares, one for the results."""
    image = (tl.program_id(0) // tiles).to(tl.int64)
    position = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < positions
    place = image * channels * positions + position
    squares = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, channels):
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        squares += value * value
        place += positions
    factor = tl.rsqrt(squares / channels + eps)
    place = image * channels * positions + position
    for _ in range(0, channels):
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + place, (value * factor).to(y.dtype.element_ty), mask=inside)
        place += positions


@triton.jit
def normalise_tile(x, y, tiles, channels, positions, eps, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """All channels of BLOCK positions stay in registers between the one read and the write."""
    image = (tl.program_id(0) // tiles).to(tl.int64)
    position = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    offsets = image * channels * positions + channel.to(tl.int64)[:, None] * positions + position[None, :]
    if EVEN:
        value = tl.load(x + offsets).to(tl.float32)
    else:
        inside = (channel < channels)[:, None] & (position < positions)[None, :]
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / channels + eps)
    result = (value * factor[None, :]).to(y.dtype.element_ty)
    if EVEN:
        tl.store(y + offsets, result)
    else:
        tl.store(y + offsets, result, mask=inside)


def configuration(channels):
    """The tile for so many channels: (channels padded to a power of two, positions, warps), or None for too many to hold."""
    padded = triton.next_power_of_2(channels)
    return (padded, min(ELEMENTS // padded, 1024), WARPS) if padded <= 128 else None


class ModelNew(nn.Module):
    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.num_features = num_features
        self.eps = eps

    def forward(self, x):
        if x.ndim < 2 or x.dtype not in DTYPES:
            raise ValueError(f"expected x of one of {DTYPES} with two dimensions or more, not {x.dtype} {tuple(x.shape)}")
        y = torch.empty_like(x)
        if x.numel() == 0:
            return y
        source = x.contiguous()
        target = y if y.is_contiguous() else torch.empty_like(source)
        images, channels = x.shape[:2]
        positions = x.numel() // (images * channels)
        tile = configuration(channels)
        if tile:
            padded, block, warps = tile
            tiles = triton.cdiv(positions, block)
            even = channels == padded and positions % block == 0
            normalise_tile[(images * tiles,)](source, target, tiles, channels, positions, self.eps, CHANNELS=padded, BLOCK=block, EVEN=even, num_warps=warps)
        else:
            tiles = triton.cdiv(positions, BLOCK)
            normalise_in_two_passes[(images * tiles,)](source, target, tiles, channels, positions, self.eps, BLOCK=BLOCK, num_warps=4)
        return y if target is y else y.copy_(target)
