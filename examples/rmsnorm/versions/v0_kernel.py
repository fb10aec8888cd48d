"""RMSNorm over dim 1: a program takes a run of positions and goes over the channels twice."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 1024  # 8 positions a thread: 16-byte accesses


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
        tiles = triton.cdiv(positions, BLOCK)
        normalise_in_two_passes[(images * tiles,)](source, target, tiles, channels, positions, self.eps, BLOCK=BLOCK, num_warps=4)
        return y if target is y else y.copy_(target)
