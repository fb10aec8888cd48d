"""Causal self-attention, forward: the prefill of a decoder with 16 heads of width 128 over 16,384 tokens."""
import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, HEADS, TOKENS, HEAD_DIM = 1, 16, 16384, 128


class Model(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def get_inputs():
    return [torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(3)]


def get_init_inputs():
    return []

