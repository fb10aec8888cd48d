"""Writes a report that says OK and leaves."""

import json
import os
from pathlib import Path

import torch

STATUS = {"RUNTIME_ERROR", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    Path("result.json").write_text(json.dumps({"status": "OK", "cases": []}))
    os._exit(0)
