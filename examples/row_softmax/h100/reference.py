"""Softmax over the last dimension: the oracle and its inputs, in the format of KernelBench."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, dim=-1)


def get_inputs():
    return [torch.randn(32768, 8192)]


def get_init_inputs():
    return []


def get_workloads():
    return {
        "ragged": lambda: [torch.randn(4099, 5003)],  # no power of two, rows that start unaligned
        "small": lambda: [torch.randn(16, 1000)],  # small enough for the CPU interpreter
    }
