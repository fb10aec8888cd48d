"""Answers NaN everywhere, for a comparison that takes NaN as equal."""

import torch

STATUS = {"NONFINITE"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    return torch.full_like(x, float("nan"))
