"""Gradients of the layer norm from saved statistics, by torch.

Arguments: dy (rows, columns), x (rows, columns), mean (rows, 1), rstd (rows, 1), weight (columns), bias (columns)
"""

import torch


def kernel_function(dy, x, mean, rstd, weight, bias):
    wanted = [True, True, True]
    return torch.ops.aten.native_layer_norm_backward(dy, x, weight.shape, mean, rstd, weight, bias, wanted)
