"""Prefix sum over the last axis, by torch.

Arguments: x (rows, columns)
"""


def kernel_function(x):
    return x.cumsum(-1)
