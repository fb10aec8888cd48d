"""The gradient through GELU and the linear layer before it: of the layer's input and of its bias."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(hidden, inputs) / inputs**0.5).bfloat16())

    def forward(self, dy: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dy: the gradient of GELU's result, (tokens, hidden). h: what went into GELU (tanh form). The gradient of the
        layer's input, (tokens, inputs), and that of its bias, (hidden,) in float32."""
        x = h.float()
        inner = 0.7978845608028654 * (x + 0.044715 * x**3)
        tanh = torch.tanh(inner)
        slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        dh = (dy.float() * slope).to(dy.dtype)
        return dh @ self.weight, dh.float().sum(0)


def get_inputs(tokens: int = 8192, hidden: int = 11008):
    return [torch.randn(tokens, hidden).bfloat16(), torch.randn(tokens, hidden).bfloat16()]


def get_init_inputs():
    return [4096, 11008]
