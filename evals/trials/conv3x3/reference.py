"""A 3x3 convolution with bias and ReLU, channels last: a product of 100352 x 256 x 1152, bound by computing."""

import torch
import torch.nn as nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self, channels: int = 128, filters: int = 256):
        super().__init__()
        weight = torch.randn(filters, channels, 3, 3) / (9 * channels) ** 0.5
        self.weight = nn.Parameter(weight.bfloat16().to(memory_format=torch.channels_last))
        self.bias = nn.Parameter(torch.randn(filters).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(functional.conv2d(x, self.weight, self.bias, padding=1))


def get_inputs(*, images: int = 32, channels: int = 128, side: int = 56):
    return [torch.randn(images, channels, side, side).bfloat16().to(memory_format=torch.channels_last)]


def get_init_inputs(*, channels: int = 128, filters: int = 256):
    return [channels, filters]
