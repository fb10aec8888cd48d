"""Ends the process by SystemExit with code 0."""

import torch

STATUS = {"RUNTIME_ERROR", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    raise SystemExit(0)
