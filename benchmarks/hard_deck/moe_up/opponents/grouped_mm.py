"""Yardstick: torch's grouped product for gate and for up, then silu and the multiplication."""

import torch
from torch.nn import functional


def kernel_function(x, gate, up, offsets):
    ends = offsets[1:]
    return functional.silu(torch._grouped_mm(x, gate, offs=ends)) * torch._grouped_mm(x, up, offs=ends)
