"""Group normalisation."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, groups, weight, bias, eps):
        return nn.functional.group_norm(x, groups, weight, bias, eps)


def get_inputs(*, batch=4, groups=4, channels=8, length=64):
    if channels * length < 2:
        raise ValueError("one number has no variance")
    count = groups * channels
    return [torch.randn(batch, count, length), groups, torch.randn(count), torch.randn(count), 1e-5]


def get_workloads():
    return {"wide": {"batch": 1, "groups": 2, "channels": 16, "length": 4096}}


LAYOUTS = "contiguous"
