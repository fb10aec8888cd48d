"""Switches tf32 on and lets torch multiply the fp32 matrices."""

import torch

STATUS = {"WRONG_VALUES", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b


def get_inputs():
    return [torch.randn(512, 512), torch.randn(512, 512)]


def kernel_function(a, b):
    torch.backends.cuda.matmul.allow_tf32 = True
    return a @ b
