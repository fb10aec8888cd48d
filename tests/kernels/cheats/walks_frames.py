"""Walks the callers' frames for a tensor that looks like the expected output."""

import sys

import torch

STATUS = {"WRONG_VALUES", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def kernel_function(x):
    frame = sys._getframe(1)
    while frame:
        for name, value in frame.f_locals.items():
            for tensor in tensors(value):
                if name in ("expected", "oracle", "baseline", "originals") and tensor.shape == x.shape:
                    return tensor.clone()
        frame = frame.f_back
    return torch.zeros_like(x)
