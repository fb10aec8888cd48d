"""Yardstick, not a candidate: the library's product with its own bias + GELU (tanh) epilogue, and the residual added by a second kernel."""
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x, residual):
        return torch._addmm_activation(self.linear.bias, x, self.linear.weight.t(), use_gelu=True) + residual
