"""The product of a triangle update (AlphaFold's outgoing edges) with its gates: for each channel c,
y[i, j, c] = g[i, j, c] * sum over k of a[i, k, c] b[j, k, c], all of it with the channels last, bf16, summed in float32.
"""

import torch
from torch import nn

NODES, CHANNELS = 1024, 128


class Model(nn.Module):
    def forward(self, a, b, gate):
        product = torch.matmul(a.permute(2, 0, 1), b.permute(2, 1, 0))
        return torch.sigmoid(gate) * product.permute(1, 2, 0)


def get_inputs(*, nodes=NODES, channels=CHANNELS):
    return [torch.randn(nodes, nodes, channels, dtype=torch.bfloat16) for _ in range(3)]


def get_init_inputs():
    return []
