"""The gradient through a gated MLP, y = (SiLU(x @ gate^T) * (x @ up^T)) @ down^T, of its input x.

g = x @ gate^T and u = x @ up^T were kept from the forward pass. What goes into the last two products is rounded to bf16.
"""

import torch
from torch import nn

TOKENS, WIDTH, HIDDEN = 4096, 4096, 5632


class Model(nn.Module):
    def __init__(self, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.gate = nn.Parameter((torch.randn(hidden, width) / width**0.5).bfloat16())
        self.up = nn.Parameter((torch.randn(hidden, width) / width**0.5).bfloat16())
        self.down = nn.Parameter((torch.randn(width, hidden) / hidden**0.5).bfloat16())

    def forward(self, dy, g, u):
        """dy: the gradient of y, (tokens, width). g, u: (tokens, hidden). The gradient of x, (tokens, width). All in
        bf16."""
        dh = (dy @ self.down).float()
        gate, up = g.float(), u.float()
        sigmoid = torch.sigmoid(gate)
        du = (dh * gate * sigmoid).bfloat16()
        dg = (dh * up * sigmoid * (1 + gate * (1 - sigmoid))).bfloat16()
        return dg @ self.gate + du @ self.up


def get_inputs(*, tokens=TOKENS, width=WIDTH, hidden=HIDDEN):
    return [torch.randn(tokens, size, dtype=torch.bfloat16) for size in (width, hidden, hidden)]


def get_init_inputs(*, width=WIDTH, hidden=HIDDEN):
    return [width, hidden]
