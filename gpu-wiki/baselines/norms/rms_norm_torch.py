"""RMS norm over the last axis, by torch.

Arguments: x (rows, columns), weight (columns)
"""

from torch.nn import functional

EPS = 1e-6


def kernel_function(x, weight):
    return functional.rms_norm(x, weight.shape, weight, EPS)
