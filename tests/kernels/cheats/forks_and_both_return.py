"""Forks; the parent answers zeros at once, the child comes back later with the truth and writes over it."""

import os
import time

import torch

STATUS = {"WRONG_VALUES", "CHEAT_SUSPECT", "RUNTIME_ERROR"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    if os.fork():
        return torch.zeros_like(x)
    time.sleep(1)
    return torch.clamp(x, min=0) * 2.0
