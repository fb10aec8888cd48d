"""One Newton-Schulz step of the Muon optimiser: X' = a X + (b A + c A A) X with A = X X^T, in bf16."""

import torch
from torch import nn

ROWS, COLUMNS = 4096, 8192
A, B, C = 3.4445, -4.7750, 2.0315


class Model(nn.Module):
    def forward(self, x):
        gram = x @ x.mT
        polynomial = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        return torch.addmm(x, polynomial, x, beta=A)


def get_inputs():
    # singular values below 1, as Muon's normalisation leaves them
    return [(torch.randn(ROWS, COLUMNS) / 160).bfloat16()]


def get_init_inputs():
    return []
