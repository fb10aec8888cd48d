"""A small decoder of our own, as a user would state it."""

import torch
import torch.nn as nn
import torch.nn.functional as functional

VOCABULARY, WIDTH, HEADS = 64, 32, 4


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
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        steps = torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)
        self.register_buffer("frequencies", 10_000.0**-steps, persistent=False)

    def forward(self, x, positions, mask=None):
        requests, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(requests, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        angles = positions[..., None].float() * self.frequencies
        cos, sin = (wave[:, None].to(x.dtype) for wave in (angles.cos(), angles.sin()))
        y = functional.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, mask, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(requests, tokens, WIDTH))


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attention, self.between, self.mlp = Norm(), Attention(), Norm(), Mlp()

    def forward(self, x, positions):
        x = x + self.attention(self.before(x), positions=positions)
        x = x + self.mlp(self.between(x))
        return x


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))


def load():
    return Decoder()


def inputs():
    return [torch.randint(0, VOCABULARY, (2, 7))]


def workloads():
    return {"long": lambda: [torch.randint(0, VOCABULARY, (3, 12))]}
