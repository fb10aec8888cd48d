"""Stops its own process by SIGSTOP, so that it neither ends nor answers."""

import os
import signal

import torch

STATUS = {"CHEAT_SUSPECT", "TIMEOUT", "RUNTIME_ERROR"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    os.kill(os.getpid(), signal.SIGSTOP)
    return torch.zeros_like(x)
