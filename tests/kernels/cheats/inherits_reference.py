"""Inherits the reference and changes nothing."""

import torch

STATUS = {"CHEAT_SUSPECT"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


class ModelNew(Model):
    pass
