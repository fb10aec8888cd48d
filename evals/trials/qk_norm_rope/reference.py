"""What a decoder does to its queries and keys before attention, in place: an RMSNorm of each head, then a rotation by
the token's position. Values stay. 336 MB are read and written, so it is bound by memory."""

import torch
import torch.nn as nn

MUTATES = ("qkv",)
EPSILON = 1e-6


class Model(nn.Module):
    def __init__(self, query_heads: int = 32, key_heads: int = 8, width: int = 128):
        super().__init__()
        self.query_heads, self.key_heads, self.width = query_heads, key_heads, width
        self.query_norm = nn.Parameter(torch.rand(width).bfloat16() + 0.5)
        self.key_norm = nn.Parameter(torch.rand(width).bfloat16() + 0.5)

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """qkv: (tokens, (query_heads + 2 key_heads) width). positions: rows of cos and sin, (most, width / 2) each."""
        heads = qkv.view(len(qkv), -1, self.width)
        queries, keys, _ = heads.split([self.query_heads, self.key_heads, self.key_heads], dim=1)
        for part, weight in ((queries, self.query_norm), (keys, self.key_norm)):
            part.copy_(rotated(normed(part, weight), cos[positions], sin[positions]))


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPSILON)
    return x.float() * scale * weight.float()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Each head's first half turned against its second."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def get_inputs(*, tokens: int = 16384, query_heads: int = 32, key_heads: int = 8, width: int = 128, most: int = 4096):
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(most)[:, None] * frequencies
    return [
        torch.randn(tokens, (query_heads + 2 * key_heads) * width).bfloat16(),
        torch.randint(0, most, (tokens,)),
        angles.cos(),
        angles.sin(),
    ]


def get_init_inputs(*, query_heads: int = 32, key_heads: int = 8, width: int = 128):
    return [query_heads, key_heads, width]
