"""Causal attention with capped scores and shared key heads (Gemma 2's, head width 256): 137 GFLOP, bound by computing."""

import math

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, cap: float = 50.0):
        super().__init__()
        self.cap = cap

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group, tokens = q.shape[1] // k.shape[1], q.shape[2]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.tanh(q @ k.transpose(-1, -2) / (math.sqrt(q.shape[-1]) * self.cap)) * self.cap
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        return torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1) @ v


def get_inputs(*, heads: int = 16, key_heads: int = 8, tokens: int = 4096, width: int = 256):
    q, k, v = (torch.randn(1, n, tokens, width) for n in (heads, key_heads, key_heads))
    return [(8 * q).bfloat16(), k.bfloat16(), v.bfloat16()]  # scores of 8 and more, so that the cap counts


def get_init_inputs(*, cap: float = 50.0):
    return [cap]
