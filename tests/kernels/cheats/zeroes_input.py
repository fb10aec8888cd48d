"""Zeroes the input, so that a reference that runs later on it would agree with zeros."""

import torch

STATUS = {"INPUT_MUTATED", "WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    x.zero_()
    return torch.zeros_like(x)
