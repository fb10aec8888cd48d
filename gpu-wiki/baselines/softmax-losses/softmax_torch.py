"""Softmax over the last axis, by torch.

Arguments: x (rows, columns)
"""

import torch


def kernel_function(x):
    return torch.softmax(x, -1)
