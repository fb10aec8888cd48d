"""Gated RMS norm over the last dimension."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = x * torch.nn.functional.silu(gate)
        return gated * torch.rsqrt(gated.square().mean(dim=-1, keepdim=True) + 1e-6)


def get_inputs():
    return [torch.randn(8192, 4096), torch.randn(8192, 4096)]


def get_init_inputs():
    return []


def get_workloads():
    return {
        "ragged": lambda: [torch.randn(1031, 3001), torch.randn(1031, 3001)],
        "small": lambda: [torch.randn(16, 100), torch.randn(16, 100)],
    }
