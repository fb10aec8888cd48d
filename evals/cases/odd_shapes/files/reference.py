"""Maximum of each row: what kernel.py must give."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.amax(dim=-1)


def get_inputs():
    return [torch.randn(64, 1000)]
