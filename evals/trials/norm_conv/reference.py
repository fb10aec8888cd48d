"""Half of a residual block of an image decoder: out = conv3x3(silu(group_norm(x))) + residual, bf16. x, residual (images,
height, width, channels), channels last in memory; 32 groups; padding 1. weight (channels out, channels in, 3, 3).
"""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self, channels=512):
        super().__init__()
        self.norm_weight = nn.Parameter((1 + torch.randn(channels) / 8).bfloat16())
        self.norm_bias = nn.Parameter((torch.randn(channels) / 8).bfloat16())
        weight = (torch.randn(channels, channels, 3, 3) / (9 * channels) ** 0.5).bfloat16()
        self.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last))
        self.bias = nn.Parameter(torch.randn(channels).bfloat16())

    def forward(self, x, residual):
        nchw = x.permute(0, 3, 1, 2)
        normed = functional.group_norm(nchw.float(), 32, self.norm_weight.float(), self.norm_bias.float(), 1e-6)
        out = functional.conv2d(functional.silu(normed).bfloat16(), self.weight, self.bias, padding=1)
        return out.permute(0, 2, 3, 1).contiguous() + residual


def get_inputs(*, images=4, height=128, width=128, channels=512):
    return [torch.randn(images, height, width, channels, dtype=torch.bfloat16) for _ in range(2)]


def get_init_inputs(*, channels=512):
    return [channels]
