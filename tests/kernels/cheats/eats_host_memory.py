"""Asks for a petabyte of host memory."""

import torch

STATUS = {"OOM"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    return torch.relu(x) * (len(bytearray(1 << 50)) and 2.0)
