"""A Llama-like decoder: RMSNorm, rotary positions, grouped queries, gated MLP. Four layers with the sizes of an 8 B
model and a smaller vocabulary: 1.1 B parameters.

With a cache, a step is one token a request, and the cache is a buffer of its full length under a mask, as a CUDA graph
needs it."""

import torch
import torch.nn as nn
import torch.nn.functional as functional
from sizes import SMALL, size

VOCABULARY, WIDTH, HIDDEN = size(32000, 97), size(4096, 64), size(14336, 96)
HEADS, KV_HEADS, HEAD = size(32, 4), size(8, 2), size(128, 32)
LAYERS = size(4, 2)
REQUESTS, LONGEST = size(8, 2), size(4096, 128)  # of the cache


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH) + 0.1 * torch.randn(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    def __init__(self, cached: bool):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False) for _ in range(2))
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.cached = cached
        if cached:
            self.register_buffer("keys", torch.randn(REQUESTS, KV_HEADS, LONGEST, HEAD))
            self.register_buffer("values", torch.randn(REQUESTS, KV_HEADS, LONGEST, HEAD))

    def forward(self, x, cos, sin, positions, mask):
        requests, tokens, _ = x.shape
        q = self.q(x).view(requests, tokens, HEADS, HEAD).transpose(1, 2)
        k = self.k(x).view(requests, tokens, KV_HEADS, HEAD).transpose(1, 2)
        v = self.v(x).view(requests, tokens, KV_HEADS, HEAD).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if self.cached:
            self.keys.index_copy_(2, positions, k)
            self.values.index_copy_(2, positions, v)
            k, v = self.keys, self.values
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(requests, tokens, HEADS * HEAD))


class Block(nn.Module):
    def __init__(self, cached: bool):
        super().__init__()
        self.before, self.attention, self.between, self.mlp = Norm(), Attention(cached), Norm(), Mlp()

    def forward(self, x, cos, sin, positions, mask):
        x = x + self.attention(self.before(x), cos, sin, positions, mask)
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    def __init__(self, cached: bool):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(cached) for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("frequencies", 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD), persistent=False)
        self.cached = cached

    def forward(self, tokens, positions=None):
        mask = None
        if self.cached:
            mask = torch.arange(LONGEST, device=tokens.device)[None] <= positions[:, None]
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = positions[:, None].float() * self.frequencies.float()
        cos, sin = angles.cos().to(self.head.weight.dtype), angles.sin().to(self.head.weight.dtype)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, positions, mask)
        return self.head(self.norm(x))


def made(cached: bool) -> Decoder:
    """In bf16; small ones in fp32, because Triton's interpreter has no bf16 products."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if SMALL else torch.bfloat16)
    try:
        return Decoder(cached)
    finally:
        torch.set_default_dtype(usual)
