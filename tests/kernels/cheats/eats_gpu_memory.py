"""Takes all memory of the GPU and keeps it."""

import torch

STATUS = {"OOM"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


KEPT = []


def kernel_function(x):
    while True:
        KEPT.append(torch.ones(1 << 28, device=x.device))
