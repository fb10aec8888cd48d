"""A ConvNeXt in bf16, channels last: depthwise 7x7, LayerNorm, and an MLP over the channels. The widths are those of
ConvNeXt-B, the depths those of the smallest ones."""

import torch
import torch.nn as nn
import torch.nn.functional as functional
from sizes import SMALL, size

WIDTHS, DEPTHS = ((16, 32), (1, 2)) if SMALL else ((128, 256, 512, 1024), (2, 2, 6, 2))
IMAGES, SIDE = size(64, 2), size(224, 32)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (images, channels, rows, columns)."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def stage(before: int, width: int, depth: int, step: int) -> nn.Sequential:
    """Smaller images by `step`, then the blocks."""
    reduce = nn.Conv2d(before, width, step, stride=step)
    norm = ChannelNorm(before, eps=1e-6) if before != 3 else nn.Identity()
    return nn.Sequential(norm, reduce, *(Block(width) for _ in range(depth)))


class ConvNext(nn.Module):
    def __init__(self):
        super().__init__()
        befores, steps = (3, *WIDTHS[:-1]), (4, *(2 for _ in WIDTHS[1:]))
        self.stages = nn.ModuleList(map(stage, befores, WIDTHS, DEPTHS, steps))
        self.norm, self.head = nn.LayerNorm(WIDTHS[-1], eps=1e-6), nn.Linear(WIDTHS[-1], size(1000, 10))

    def forward(self, images):
        x = images
        for one in self.stages:
            x = one(x)
        return self.head(self.norm(x.mean((2, 3))))


def load():
    return ConvNext().to(torch.bfloat16).to(memory_format=torch.channels_last)


def inputs():
    return images(IMAGES, SIDE)


def workloads():
    return {"other size": lambda: images(size(16, 1), size(288, 48))}


def images(count: int, side: int) -> list:
    return [torch.randn(count, 3, side, side, dtype=torch.bfloat16).to(memory_format=torch.channels_last)]
