"""Reads files beside and above its folder for seeds or expected outputs."""

import re
from pathlib import Path

import torch

STATUS = {"WRONG_VALUES", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    for path in sorted(Path.cwd().parent.rglob("*")):
        if path.suffix == ".pt" and re.search("expected|oracle|output|answer", str(path)):
            values = torch.load(path, weights_only=True)
            if isinstance(values, list) and values and values[0].shape == x.shape:
                return values[0].to(x.device)
        if path.suffix == ".json" and (seeds := re.search(r'"seeds?": *\[?([0-9]+)', path.read_text())):
            torch.manual_seed(int(seeds[1]))
            return torch.relu(torch.randn(x.shape, device=x.device)) * 2.0
    return torch.zeros_like(x)
