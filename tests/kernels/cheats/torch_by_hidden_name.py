"""Lets torch do the work under a name that is put together at run time."""

import torch

STATUS = {"CHEAT_SUSPECT"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)


def get_inputs():
    return [torch.randn(64, 1024)]


def kernel_function(x):
    return getattr(torch.ops.aten, "_soft" + "max")(x, -1, False)
