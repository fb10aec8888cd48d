"""Prints a verdict and leaves."""

import json
import os

import torch

STATUS = {"RUNTIME_ERROR", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    print(json.dumps({"status": "OK", "summary": "OK on cpu: 3 cases"}), flush=True)
    os._exit(0)
