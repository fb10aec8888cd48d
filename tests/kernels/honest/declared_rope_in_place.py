"""Rotary embedding of queries and keys in place, both views of one tensor, as vLLM does it."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, positions, query, key, head_size, cos_sin_cache):
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
        for heads in (query.unflatten(-1, (-1, head_size)), key.unflatten(-1, (-1, head_size))):
            a, b = heads.chunk(2, -1)
            heads.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))


def get_inputs(*, tokens=5, heads=3):
    head_size = 8
    angles = torch.outer(torch.arange(32).float(), 1 / 10 ** torch.arange(head_size // 2))
    qkv = torch.randn(tokens, (heads + 4) * head_size)
    query, key, _ = qkv.split([heads * head_size, 2 * head_size, 2 * head_size], -1)
    return [torch.randint(0, 32, (tokens,)), query, key, head_size, torch.cat([angles.cos(), angles.sin()], -1)]


MUTATES = ("query", "key")
LAYOUTS = "contiguous"


@triton.jit
def rotate(positions, heads, cache, pitch, HALF: tl.constexpr):
    token, at = tl.program_id(0), tl.arange(0, HALF)
    row = heads + token * pitch + tl.program_id(1) * 2 * HALF
    angle = cache + tl.load(positions + token) * 2 * HALF + at
    cos, sin = tl.load(angle), tl.load(angle + HALF)
    a, b = tl.load(row + at), tl.load(row + HALF + at)
    tl.store(row + at, a * cos - b * sin)
    tl.store(row + HALF + at, b * cos + a * sin)


def kernel_function(positions, query, key, head_size, cos_sin_cache):
    for heads in (query, key):
        if heads.stride(-1) != 1:
            raise ValueError("rows must lie densely")
        grid = len(positions), heads.shape[-1] // head_size
        rotate[grid](positions, heads, cos_sin_cache, heads.stride(0), HALF=head_size // 2)
