"""Largest absolute value of each column, with the absolute value taken too late."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

ROWS, COLUMNS = 64, 128  # of a tile


@triton.jit
def peaks_of_tiles(x, y, rows, columns, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(y + tl.program_id(1).to(tl.int64) * columns + column, tl.abs(tl.max(value, 0)), mask=column < columns)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 2 or x.dtype != torch.float32:
            raise ValueError("a float32 matrix")
        x = x.contiguous()
        while True:
            rows, columns = x.shape
            tiles = triton.cdiv(rows, ROWS)
            y = torch.empty((tiles, columns), dtype=x.dtype, device=x.device)
            grid = (triton.cdiv(columns, COLUMNS), tiles)
            peaks_of_tiles[grid](x, y, rows, columns, tile_rows=ROWS, tile_columns=COLUMNS)
            if tiles == 1:
                return y[0]
            x = y
