"""Residual add in place, RMSNorm and e4m3 with a scale a token, before an fp8 product of a transformer."""

import torch
import torch.nn as nn

MUTATES = ("residual",)


class Model(nn.Module):
    """What a transformer layer does before its fp8 product: add to the residual stream in place, RMSNorm of the sum,
    and a scale a token: (the normed values in e4m3, the scales)."""

    def forward(self, x, residual, weight):
        residual.add_(x)
        summed = residual.float()
        normed = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
        scale = normed.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
        return (normed / scale).to(torch.float8_e4m3fn), scale.float()


def get_inputs(*, tokens=16384, hidden=8192):
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    residual = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    weight = (1 + 0.1 * torch.randn(hidden)).to(torch.bfloat16)
    return [x, residual, weight]


def get_init_inputs():
    return []
