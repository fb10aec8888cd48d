"""A kernel that stores far outside of every allocation."""

import torch
import triton
import triton.language as tl

STATUS = {"ILLEGAL_ACCESS"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


@triton.jit
def far_away(y, distance):
    tl.store(y + distance, 1.0)


def kernel_function(x):
    y = torch.zeros_like(x)
    far_away[(1,)](y, 1 << 44)
    return y
