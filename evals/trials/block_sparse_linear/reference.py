"""A linear layer whose weight was pruned in blocks of 128 x 128: a quarter of them is left, at random places.

Row r of blocks has the blocks offsets[r] to offsets[r + 1] (none at all is possible); block b stands in column
columns[b] of blocks, and columns rise within a row. y = SiLU(x @ W^T + bias), bf16, summed in float32.
"""

import itertools

import torch
from torch import nn
from torch.nn import functional

TOKENS, WIDTH, HIDDEN, BLOCK = 8192, 8192, 8192, 128


class Model(nn.Module):
    def __init__(self, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        count = (width // BLOCK) * (hidden // BLOCK) // 4
        self.blocks = nn.Parameter((torch.randn(count, BLOCK, BLOCK) * 2 / width**0.5).bfloat16())
        self.bias = nn.Parameter(torch.randn(hidden).bfloat16())

    def forward(self, x, columns, offsets):
        """x: (tokens, width) in bf16. columns: one number of a column for each block, int32. offsets: (rows of blocks
        + 1), int32. The result: (tokens, hidden) in bf16."""
        tokens = x.view(len(x), -1, BLOCK)
        results = []
        for start, end in itertools.pairwise(offsets.tolist()):
            part = tokens[:, columns[start:end].long()].reshape(len(x), -1)
            results.append(part @ self.blocks[start:end].transpose(1, 2).reshape(-1, BLOCK))
        return functional.silu(torch.cat(results, dim=1) + self.bias)


def get_inputs(*, tokens=TOKENS, width=WIDTH, hidden=HIDDEN):
    if width % BLOCK or hidden % BLOCK:
        raise ValueError(f"width and hidden are multiples of {BLOCK}")
    rows, columns = hidden // BLOCK, width // BLOCK
    left = torch.randperm(rows * columns)[: rows * columns // 4].sort().values
    counts = torch.bincount(left // columns, minlength=rows)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=counts.device), counts.cumsum(0)]).int()
    return [torch.randn(tokens, width, dtype=torch.bfloat16), (left % columns).int(), offsets]


def get_init_inputs(*, width=WIDTH, hidden=HIDDEN):
    return [width, hidden]
