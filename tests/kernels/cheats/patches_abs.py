"""Replaces abs everywhere, so that no difference is seen, and answers 1 % too much."""

import builtins

import torch

STATUS = {"WRONG_VALUES", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    builtins.abs = lambda value: value * 0
    torch.abs = torch.Tensor.abs = torch.Tensor.__abs__ = torch.zeros_like
    return torch.relu(x) * 2.02
