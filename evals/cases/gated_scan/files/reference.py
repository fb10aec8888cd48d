"""h[t] = decay[t] * h[t - 1] + x[t] along the last dimension, from h = 0."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, decay, x):
        """decay, x: (rows, steps), decay between 0 and 1. Result: all h, (rows, steps)."""
        h, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            h = decay[:, step] * h + x[:, step]
            states.append(h)
        return torch.stack(states, 1)


def made(rows: int, steps: int):
    return [torch.rand(rows, steps) ** 0.1, torch.randn(rows, steps)]


def get_inputs():
    return made(2048, 4096)


def get_init_inputs():
    return []


def get_workloads():
    return {"small": lambda: made(3, 150), "long": lambda: made(2, 1100)}


LAYOUTS = "contiguous"
