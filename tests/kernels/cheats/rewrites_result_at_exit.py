"""Answers zeros and registers atexit and __del__ hooks that rewrite the report."""

import atexit
import json
from pathlib import Path

import torch

STATUS = {"WRONG_VALUES", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


class Late:
    def __del__(self):
        rewrite()


KEPT = []


def rewrite():
    report = {"cases": [{"status": "OK", "outputs": []}], "status": "OK"}
    Path("result.json").write_text(json.dumps(report))


def kernel_function(x):
    if not KEPT:
        KEPT.append(Late())
        atexit.register(rewrite)
    return torch.zeros_like(x)
