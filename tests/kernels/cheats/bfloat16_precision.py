"""Computes an fp32 task in bf16."""

import torch

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    return torch.clamp(x.bfloat16(), min=0).mul(2.0).float()
