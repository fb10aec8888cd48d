"""Yardstick: torch's grouped product for gate and for up; torch.compile makes one kernel of silu and multiplication."""

import torch
from torch.nn import functional


@torch.compile
def silu_and_multiply(a, b):
    return functional.silu(a) * b


def kernel_function(x, gate, up, offsets):
    ends = offsets[1:]
    return silu_and_multiply(torch._grouped_mm(x, gate, offs=ends), torch._grouped_mm(x, up, offs=ends))
