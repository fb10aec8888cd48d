"""The entry of a transformer's layer: RMSNorm of the hidden states, the joint projection to queries, keys and values with
bias, and RMSNorm of each head of queries and keys. bf16, sums in float32.
"""

import torch
from torch import nn

TOKENS, HIDDEN, QUERY_HEADS, KEY_HEADS, WIDTH = 8192, 4096, 32, 8, 128
EPSILON = 1e-6


def normed(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight


class Model(nn.Module):
    def __init__(self, hidden=HIDDEN, query_heads=QUERY_HEADS, key_heads=KEY_HEADS, width=WIDTH):
        super().__init__()
        self.query_heads, self.key_heads, self.width = query_heads, key_heads, width
        self.norm = nn.Parameter((1 + 0.1 * torch.randn(hidden)).bfloat16())
        self.projection = nn.Parameter(
            (torch.randn((query_heads + 2 * key_heads) * width, hidden) / hidden**0.5).bfloat16()
        )
        self.bias = nn.Parameter((0.1 * torch.randn((query_heads + 2 * key_heads) * width)).bfloat16())
        self.query_norm = nn.Parameter((1 + 0.1 * torch.randn(width)).bfloat16())
        self.key_norm = nn.Parameter((1 + 0.1 * torch.randn(width)).bfloat16())

    def forward(self, x):
        joint = nn.functional.linear(normed(x, self.norm), self.projection, self.bias)
        heads = joint.view(len(x), -1, self.width)
        queries, keys, values = heads.split([self.query_heads, self.key_heads, self.key_heads], dim=1)
        return normed(queries, self.query_norm), normed(keys, self.key_norm), values.contiguous()


def get_inputs(*, tokens=TOKENS, hidden=HIDDEN):
    return [torch.randn(tokens, hidden, dtype=torch.bfloat16)]


def get_init_inputs(*, hidden=HIDDEN):
    return [hidden]
