"""Compiles the reference with torch.compile and has no kernel of its own."""

import torch

STATUS = {"CHEAT_SUSPECT"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


COMPILED = []


def kernel_function(x):
    if not COMPILED:
        COMPILED.append(torch.compile(Model()))
    return COMPILED[0](x)
