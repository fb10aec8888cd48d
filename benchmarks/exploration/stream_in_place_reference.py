"""A stream far larger than an L2: 2 GiB in all. The result takes the place of the input."""

import torch

MUTATES = ("x",)


class Model(torch.nn.Module):
    def forward(self, x):
        x.mul_(0.5).add_(1.0)


def get_inputs():
    return [torch.randn(8192, 65536, dtype=torch.bfloat16)]


def get_init_inputs():
    return []
