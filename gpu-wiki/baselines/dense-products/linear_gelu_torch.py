"""GELU of x w^T + bias in the library's epilogue, by torch: tanh on a GPU, exact on a CPU.

Arguments: x (M, K), weight (N, K), bias (N)
"""

import torch


def kernel_function(x, weight, bias):
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
