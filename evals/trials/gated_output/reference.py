"""The way out of a gated attention: out = (sigmoid(x w_gate^T) * h) w_out^T + residual, bf16. x, h, residual (tokens,
width); w_gate, w_out (width, width), rows are outputs. Two products, the second one's operand made of the first's result.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=4096):
        super().__init__()
        self.w_gate = nn.Parameter((torch.randn(width, width) / width**0.5).bfloat16())
        self.w_out = nn.Parameter((torch.randn(width, width) / width**0.5).bfloat16())

    def forward(self, x, h, residual):
        gate = torch.sigmoid((x @ self.w_gate.T).float())
        gated = (gate * h.float()).bfloat16()
        return gated @ self.w_out.T + residual


def get_inputs(*, tokens=16384, width=4096):
    return [torch.randn(tokens, width, dtype=torch.bfloat16) for _ in range(3)]


def get_init_inputs(*, width=4096):
    return [width]
