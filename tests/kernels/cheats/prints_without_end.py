"""Prints 20 MB at each call and answers zeros."""

import torch

STATUS = {"WRONG_VALUES", "RUNTIME_ERROR", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    for _ in range(20):
        print("x" * (1 << 20))
    return torch.zeros_like(x)
