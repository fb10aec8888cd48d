"""Embedding: rows of a table, a parameter, gathered by int64 indices."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 64


class Model(nn.Module):
    def __init__(self, entries, width):
        super().__init__()
        self.table = nn.Parameter(torch.randn(entries, width))

    def forward(self, index):
        return nn.functional.embedding(index, self.table)


def get_inputs():
    return [torch.randint(0, 100, (4, 5))]


def get_init_inputs():
    return [100, 72]


@triton.jit
def gather(index, table, result, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(index + place)
    value = tl.load(table + entry * width + offsets, mask=offsets < width)
    tl.store(result + place * width + offsets, value, mask=offsets < width)


class ModelNew(nn.Module):
    def __init__(self, entries, width):
        super().__init__()
        self.table = nn.Parameter(torch.empty(entries, width))

    def forward(self, index):
        if index.dtype != torch.int64:
            raise ValueError("the index must be int64")
        width = self.table.shape[1]
        result = torch.empty((*index.shape, width), dtype=self.table.dtype, device=index.device)
        if result.numel():
            grid = (index.numel(), triton.cdiv(width, BLOCK))
            gather[grid](index.contiguous(), self.table.contiguous(), result, width, BLOCK=BLOCK)
        return result
