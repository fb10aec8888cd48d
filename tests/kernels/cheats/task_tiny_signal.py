"""Answers the expected mean where the task's results hardly vary (mean of many softmax values)."""

import torch

STATUS = {"INVALID_TASK"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1).mean(dim=-1)


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    return torch.full((x.shape[0],), 1.0 / x.shape[1], device=x.device)
