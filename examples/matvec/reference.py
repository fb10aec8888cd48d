"""Matrix-vector product with a very long inner dimension: A (M x K) times B (K x 1)."""

import torch
import torch.nn as nn

M, K = 2048, 1048576


class Model(nn.Module):
    def forward(self, A, B):
        return torch.matmul(A, B)


def get_inputs():
    return [torch.randn(M, K), torch.randn(K, 1)]


def get_init_inputs():
    return []

