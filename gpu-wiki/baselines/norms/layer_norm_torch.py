"""Layer norm over the last axis, by torch.

Arguments: x (rows, columns), weight (columns), bias (columns)
"""

from torch.nn import functional

EPS = 1e-5


def kernel_function(x, weight, bias):
    return functional.layer_norm(x, weight.shape, weight, bias, EPS)
