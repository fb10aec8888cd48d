"""Writes a well-formed report in which no case has an output file, and leaves."""

import json
import os
import sys
from pathlib import Path

import torch

STATUS = {"RUNTIME_ERROR", "CHEAT_SUSPECT", "WRONG_SHAPE"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    request = json.loads(Path(sys.argv[-1]).read_text())
    case = {"outputs": [], "mutated": [], "aliased": False, "deterministic": True, "plain": True}
    Path("result.json").write_text(json.dumps({"cases": [case for _ in request["arguments"]["inputs"]]}))
    os._exit(0)
