"""silu(x gate[e]) * (x up[e]) for rows in the order of their experts: a tile of 64 x 64 a program, by pointers."""

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH, WARPS, STAGES = 64, 64, 64, 4, 3


@triton.jit
def expert_of_tile(offsets, tile, experts, ROWS: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile of rows; expert -1: there is no such tile"""
    expert, first, last, start = -1, 0, 0, 0
    for one in range(experts):
        end = tl.load(offsets + one + 1)
        tiles = (end - start + ROWS - 1) // ROWS
        mine = (tile >= 0) & (tile < tiles)
        expert = tl.where(mine, one, expert)
        first = tl.where(mine, start + tile * ROWS, first)
        last = tl.where(mine, end, last)
        tile -= tiles
        start = end
    return expert, first, last


@triton.jit
def up_projection(
    x, gate, up, y, offsets, experts, hidden, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    expert, first, last = expert_of_tile(offsets, tl.program_id(0), experts, ROWS)
    if expert >= 0:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        k = tl.arange(0, DEPTH)
        weights = expert.to(tl.int64) * hidden * inner + column
        a, b = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(0, hidden, DEPTH):
            depth = step + k
            rows = tl.load(x + row * hidden + depth[None, :], (row < last) & (depth < hidden)[None, :], 0.0)
            inside = (depth < hidden)[:, None] & (column < inner)
            a = tl.dot(rows, tl.load(gate + weights + depth[:, None] * inner, inside, 0.0), a)
            b = tl.dot(rows, tl.load(up + weights + depth[:, None] * inner, inside, 0.0), b)
        result = a * tl.sigmoid(a) * b
        tl.store(y + row * inner + column, result.to(y.dtype.element_ty), (row < last) & (column < inner))


def kernel_function(x, gate, up, offsets):
    x, gate, up, offsets = (tensor.contiguous() for tensor in (x, gate, up, offsets))
    (visits, hidden), (experts, _, inner) = x.shape, gate.shape
    y = torch.empty((visits, inner), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(visits, ROWS) + experts, triton.cdiv(inner, COLUMNS))
    up_projection[grid](
        x, gate, up, y, offsets, experts, hidden, inner, ROWS, COLUMNS, DEPTH, num_warps=WARPS, num_stages=STAGES
    )
    return y
