"""Answers with a copy of the input where the task is so trivial that this is right."""

import torch

STATUS = {"INVALID_TASK"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 1.0


def get_inputs():
    return [torch.rand(33, 64)]


def kernel_function(x):
    return x.clone()
