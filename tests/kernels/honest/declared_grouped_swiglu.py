"""Up-projections of experts: silu(x gate) * (x up) of rows that lie in the order of their experts, by offsets."""

import itertools

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x, gate, up, offsets):
        y, ends = x.new_empty(len(x), gate.shape[2]), offsets.tolist()
        for expert, (first, last) in enumerate(itertools.pairwise(ends)):
            rows = x[first:last]
            y[first:last] = torch.nn.functional.silu(rows @ gate[expert]) * (rows @ up[expert])
        return y


def get_inputs(*, rows=11, width=5, columns=12, experts=4):
    counts = torch.multinomial(torch.tensor([1.0] * experts), rows, replacement=True).bincount(minlength=experts)
    counts[-1] += counts[0]  # the first expert has no rows
    counts[0] = 0 if experts > 1 else rows
    gate, up = torch.randn(2, experts, width, columns)
    return [torch.randn(rows, width), gate, up, torch.cat([torch.zeros(1), counts.cumsum(0)]).int()]


LAYOUTS = "contiguous"


@triton.jit
def up_projection(x, gate, up, y, offsets, experts, width, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    tile, expert, first, last, start = tl.program_id(0), -1, 0, 0, 0
    for one in range(experts):
        end = tl.load(offsets + one + 1)
        tiles = (end - start + ROWS - 1) // ROWS
        mine = (tile >= 0) & (tile < tiles)
        expert, last = tl.where(mine, one, expert), tl.where(mine, end, last)
        first = tl.where(mine, start + tile * ROWS, first)
        tile, start = tile - tiles, end
    if expert >= 0:
        row, at = first + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)
        column = (tl.program_id(1) * BLOCK + at)[None, :]
        a, b = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
        for k in range(width):
            left = tl.load(x + row * width + k, mask=row < last, other=0.0)
            right = (expert * width + k) * columns + column
            a += left * tl.load(gate + right, mask=column < columns, other=0.0)
            b += left * tl.load(up + right, mask=column < columns, other=0.0)
        tl.store(y + row * columns + column, a * tl.sigmoid(a) * b, mask=(row < last) & (column < columns))


def kernel_function(x, gate, up, offsets):
    experts, width, columns = gate.shape
    y, rows = torch.empty(len(x), columns, dtype=x.dtype, device=x.device), 4
    grid = (triton.cdiv(len(x), rows) + experts, triton.cdiv(columns, 16))
    up_projection[grid](x, gate, up, y, offsets, experts, width, columns, ROWS=rows, BLOCK=16)
    return y
