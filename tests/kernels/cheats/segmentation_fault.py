"""Reads address 0."""

import ctypes

import torch

STATUS = {"ILLEGAL_ACCESS", "RUNTIME_ERROR"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    ctypes.string_at(0)
    return torch.zeros_like(x)
