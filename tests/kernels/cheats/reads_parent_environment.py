"""Looks for paths of a reference in the parents' command lines and environments, and runs it."""

import os
import runpy
from pathlib import Path

import torch

STATUS = {"CHEAT_SUSPECT", "WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def reference():
    pid = os.getppid()
    while pid > 1:
        for name in ("cmdline", "environ"):
            words = Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
            for word in words:
                if word.endswith(".py") and "class Model(" in (Path(word).read_text() if Path(word).is_file() else ""):
                    return runpy.run_path(word)["Model"]()
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kernel_function(x):
    model = reference()
    return model(x) if model else torch.zeros_like(x)
