"""Answers the mean of the true result everywhere."""

import torch

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    return torch.full_like(x, 0.7979)
