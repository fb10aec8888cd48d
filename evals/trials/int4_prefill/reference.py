"""A linear layer of 4-bit weights with many tokens (prefill): y = x W^T + bias, bf16. W (channels, width) is (q - zero)
scale, rounded to bf16; two q a byte along width, the low bits first; a scale and a zero point for each channel and 128 of
width.
"""

import torch
from torch import nn

GROUP = 128


class Model(nn.Module):
    def forward(self, x, packed, scales, zeros, bias):
        """x (tokens, width), packed (channels, width / 2) uint8, scales, zeros (channels, width / 128), bias (channels)."""
        q = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
        groups = q.unflatten(1, (-1, GROUP)).to(scales.dtype)
        weight = ((groups - zeros[:, :, None]) * scales[:, :, None]).flatten(1)
        return nn.functional.linear(x, weight, bias)


def get_inputs(*, tokens: int = 8192, width: int = 4096, channels: int = 14336):
    x = torch.randn(tokens, width, dtype=torch.bfloat16)
    packed = torch.randint(0, 256, (channels, width // 2), dtype=torch.uint8)
    scales = ((0.5 + torch.rand(channels, width // GROUP)) / (4 * width**0.5)).bfloat16()
    zeros = torch.randint(0, 16, (channels, width // GROUP)).bfloat16()
    return [x, packed, scales, zeros, torch.randn(channels, dtype=torch.bfloat16)]


def get_init_inputs():
    return []
