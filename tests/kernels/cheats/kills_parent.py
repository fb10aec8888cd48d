"""Kills the tool that started it."""

import os
import signal
from pathlib import Path

import torch

STATUS = {"CHEAT_SUSPECT", "RUNTIME_ERROR", "WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


TOOLS = ("verify_kernel", "measure_kernel_time", "run_gate")


def kernel_function(x):
    command = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    if any(tool in command for tool in TOOLS):  # nothing else is to be hurt
        os.kill(os.getppid(), signal.SIGKILL)
    return torch.zeros_like(x)
