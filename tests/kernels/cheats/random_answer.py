"""Answers with random numbers of the right scale."""

import torch

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    return torch.randn_like(x).clamp(min=0) * 2.0
