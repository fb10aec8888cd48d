"""Answers zeros; a grandchild in a session of its own puts the right outputs into the stored files later."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch

STATUS = {"WRONG_VALUES", "CHEAT_SUSPECT", "RUNTIME_ERROR"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


STARTED = []


def rewrite(request):
    for _ in range(40):
        time.sleep(0.05)
        for number, path in enumerate(request["inputs"]):
            output = Path(request["folder"]) / f"output-{number}-0.pt"
            if output.exists():
                answer = [torch.clamp(value, min=0) * 2.0 for value in torch.load(path, weights_only=True)["inputs"]]
                torch.save(answer, output)


def kernel_function(x):
    request = json.loads(Path(sys.argv[-1]).read_text())
    if not STARTED and request["job"] == "run":
        STARTED.append(True)
        if os.fork() == 0:
            os.setsid()
            with contextlib.suppress(BaseException):
                rewrite(request["arguments"])
            os._exit(0)
    return torch.zeros_like(x)
