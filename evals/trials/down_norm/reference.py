"""The end of a feed-forward layer: a projection down, the residual added, and RMSNorm of the sum for the next layer."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, inner: int, width: int):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(width, inner) / inner**0.5).bfloat16())
        self.gain = nn.Parameter((1 + 0.1 * torch.randn(width)).bfloat16())

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: (tokens, inner). residual: (tokens, width). Both bf16. The norm and the new residual stream, both
        (tokens, width) in bf16; the norm is of the stream before it was rounded."""
        stream = residual.float() + hidden.float() @ self.weight.float().T
        norm = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-6) * self.gain.float()
        return norm.to(hidden.dtype), stream.to(hidden.dtype)


def get_inputs(tokens: int = 8192, inner: int = 8192, width: int = 2048):
    return [torch.randn(tokens, inner).bfloat16(), torch.randn(tokens, width).bfloat16()]


def get_init_inputs():
    return [8192, 2048]
