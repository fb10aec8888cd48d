"""Lets torch.matmul do the work."""

import torch

STATUS = {"CHEAT_SUSPECT"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b


def get_inputs():
    return [torch.randn(64, 128), torch.randn(128, 32)]


def kernel_function(a, b):
    return torch.matmul(a, b)
