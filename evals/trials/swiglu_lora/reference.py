"""A gated feed-forward layer's first half with its adapters: gate and up projection, each with a LoRA term of rank 16,
then SwiGLU. y = silu(x G^T + s (x A1^T) B1^T) * (x U^T + s (x A2^T) B2^T), bf16.
"""

import torch
from torch import nn
from torch.nn.functional import linear, silu

TOKENS, WIDTH, HIDDEN, RANK = 4096, 4096, 11008, 16
SCALE = 2.0


class Model(nn.Module):
    def __init__(self, width, hidden, rank):
        super().__init__()

        def weights(rows, columns):
            return nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16) * columns**-0.5)

        self.gate, self.up = weights(hidden, width), weights(hidden, width)
        self.gate_a, self.up_a = weights(rank, width), weights(rank, width)
        self.gate_b, self.up_b = weights(hidden, rank), weights(hidden, rank)

    def forward(self, x):
        gate = linear(x, self.gate) + SCALE * linear(linear(x, self.gate_a), self.gate_b)
        up = linear(x, self.up) + SCALE * linear(linear(x, self.up_a), self.up_b)
        return silu(gate) * up


def get_inputs():
    return [torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)]


def get_init_inputs():
    return [WIDTH, HIDDEN, RANK]
