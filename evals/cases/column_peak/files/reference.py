"""Largest absolute value of each column."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(dim=0)


def get_inputs():
    return [torch.randn(8192, 4096)]


def get_init_inputs():
    return []


def get_workloads():
    return {"ragged": lambda: [torch.randn(3001, 1031)], "small": lambda: [torch.randn(100, 16)]}
