"""Writes a well-formed report that names the input files as output files, and leaves."""

import json
import os
import sys
from pathlib import Path

import torch

STATUS = {"RUNTIME_ERROR", "CHEAT_SUSPECT", "WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    request = json.loads(Path(sys.argv[-1]).read_text())
    sound = {"mutated": [], "aliased": False, "deterministic": True, "plain": True}
    cases = [{"outputs": [path], **sound} for path in request["arguments"]["inputs"]]
    Path("result.json").write_text(json.dumps({"cases": cases}))
    os._exit(0)
