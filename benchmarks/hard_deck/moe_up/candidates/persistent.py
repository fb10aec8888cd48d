"""silu(x gate[e]) * (x up[e]) for rows in the order of their experts, in Triton: persistent programs, tiles by TMA.

A program multiplies its rows by a tile of gate and one of up at once, so that SwiGLU is its epilogue. It finds the
expert of a tile from the offsets on the device. All row tiles of an expert for one column tile come one after the
other: they share its weights in the L2. FLATTEN joins the loops over tiles and over the width, so that copies run on
across tiles; with two sums ptxas then runs the wgmma one after the other (seen when compiled, not timed alone).
Shapes and addresses that TMA does not take go by pointers.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SPACE = [
    {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "WARPS": 8, "STAGES": 4, "FLATTEN": False, "EACH": 1},
    {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "WARPS": 8, "STAGES": 4, "FLATTEN": True, "EACH": 1},
    {"ROWS": 256, "COLUMNS": 64, "DEPTH": 64, "WARPS": 8, "STAGES": 4, "FLATTEN": False, "EACH": 1},
    {"ROWS": 128, "COLUMNS": 64, "DEPTH": 64, "WARPS": 4, "STAGES": 3, "FLATTEN": False, "EACH": 2},
]
ROWS = 128
COLUMNS = 128
DEPTH = 64
WARPS = 8
STAGES = 4
FLATTEN = False
EACH = 1  # programs a multiprocessor


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
def up_projection_by_pointers(
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


@triton.jit
def tile_at(tile, starts, ends, tiles_n, experts: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, end of the expert's rows, column tile): all row tiles of an expert for one column tile come
    one after the other, so that they share its weights in the L2."""
    tiles_m = (ends - starts + ROWS - 1) // ROWS
    before = (tl.cumsum(tiles_m, 0) - tiles_m) * tiles_n
    mine = (tile >= before) & (tile < before + tiles_m * tiles_n)
    expert = tl.sum(tl.where(mine, tl.arange(0, experts), 0), 0)
    own = tile - tl.sum(tl.where(mine, before, 0), 0)
    rows = tl.maximum(tl.sum(tl.where(mine, tiles_m, 0), 0), 1)
    first = tl.sum(tl.where(mine, starts, 0), 0) + own % rows * ROWS
    return expert, first, tl.sum(tl.where(mine, ends, 0), 0), own // rows


@triton.jit
def swiglu(a, b):
    # silu(a) = a/2 (1 + tanh(a/2)): one special function and no division, its error below half a step of bf16
    half = 0.5 * a
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1)
    return (half + half * tanh) * b


@triton.jit
def store_tile(y, first, last, column, inner, value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (first + tl.arange(0, ROWS))[:, None]
    at = column + tl.arange(0, COLUMNS)[None, :]
    tl.store(y + row.to(tl.int64) * inner + at, value.to(y.dtype.element_ty), (row < last) & (at < inner))


@triton.jit
def up_projection(
    x,
    gate,
    up,
    y,
    offsets,
    hidden,
    inner,
    experts,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    number = tl.arange(0, EXPERTS)
    starts = tl.load(offsets + number, number < experts, 0)
    ends = tl.load(offsets + number + 1, number < experts, 0)
    tiles_n = tl.cdiv(inner, COLUMNS)
    tiles = tl.sum((ends - starts + ROWS - 1) // ROWS, 0) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        expert, first, last, tile_n = tile_at(tile, starts, ends, tiles_n, EXPERTS, ROWS)
        column = tile_n * COLUMNS
        a, b = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(0, hidden, DEPTH):
            rows = x.load([first, step])
            a = tl.dot(rows, gate.load([expert * hidden + step, column]), a)
            b = tl.dot(rows, up.load([expert * hidden + step, column]), b)
        store_tile(y, first, last, column, inner, swiglu(a, b), ROWS, COLUMNS)


def programs(x):
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3


def by_pointers(x, gate, up, y, offsets):
    """For shapes that TMA does not take, and few columns."""
    (visits, hidden), (experts, _, inner) = x.shape, gate.shape
    grid = (triton.cdiv(visits, 32) + experts, triton.cdiv(inner, 64))
    sizes = {"ROWS": 32, "COLUMNS": 64, "DEPTH": 32}
    up_projection_by_pointers[grid](x, gate, up, y, offsets, experts, hidden, inner, **sizes)


def persistent(x, gate, up, y, offsets):
    hidden, (experts, _, inner) = x.shape[1], gate.shape
    panels = (TensorDescriptor.from_tensor(one.view(experts * hidden, inner), [DEPTH, COLUMNS]) for one in (gate, up))
    up_projection[(EACH * programs(x),)](
        TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
        *panels,
        y,
        offsets,
        hidden,
        inner,
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        FLATTEN=FLATTEN,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def kernel_function(x, gate, up, offsets):
    x, gate, up, offsets = (tensor.contiguous() for tensor in (x, gate, up, offsets))
    y = torch.empty((len(x), gate.shape[2]), dtype=x.dtype, device=x.device)
    by_lines = all(tensor.data_ptr() % 16 == 0 for tensor in (x, gate, up)) and x.element_size() == 2
    if y.numel():
        by_tma = by_lines and x.shape[1] % DEPTH == 0 and y.shape[1] % 8 == 0
        (persistent if by_tma else by_pointers)(x, gate, up, y, offsets)
    return y
