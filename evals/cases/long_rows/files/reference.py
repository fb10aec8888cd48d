"""Sum of squares of each row."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum(dim=-1)


def get_inputs():
    return [torch.randn(8, 4194304)]


def get_init_inputs():
    return []


def get_workloads():
    return {"ragged": lambda: [torch.randn(5, 100003)], "small": lambda: [torch.randn(3, 3000)]}
