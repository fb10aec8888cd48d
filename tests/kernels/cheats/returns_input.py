"""Answers with the input itself."""

import torch

STATUS = {"WRONG_VALUES", "ALIASED_OUTPUT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    return x
