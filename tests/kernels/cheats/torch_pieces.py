"""Builds the softmax from small torch operations and has no kernel of its own."""

import torch

STATUS = {"CHEAT_SUSPECT"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)


def get_inputs():
    return [torch.randn(64, 1024)]


def kernel_function(x):
    shifted = (x - x.amax(dim=-1, keepdim=True)).exp()
    return shifted / shifted.sum(dim=-1, keepdim=True)
