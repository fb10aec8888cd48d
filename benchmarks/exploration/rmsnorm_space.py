"""8 variants of one RMSNorm whose times lie close together: rows a program and warps."""

import torch
import triton
import triton.language as tl

SPACE = {"ROWS": [1, 2], "WARPS": [2, 4, 8, 16]}
ROWS = 1
WARPS = 8


@triton.jit
def rmsnorm(x, weight, y, n_rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows[:, None] < n_rows) & (columns[None, :] < COLUMNS)
    offsets = rows[:, None].to(tl.int64) * COLUMNS + columns[None, :]
    values = tl.load(x + offsets, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / COLUMNS + 1e-6)
    factor = tl.load(weight + columns, columns < COLUMNS, 0.0).to(tl.float32)
    tl.store(y + offsets, (values * scale[:, None] * factor[None, :]).to(tl.bfloat16), inside)


def kernel_function(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    y = torch.empty_like(x)
    grid = (triton.cdiv(rows, ROWS),)
    block = triton.next_power_of_2(columns)
    rmsnorm[grid](x, weight, y, rows, columns, block, ROWS, num_warps=WARPS)
    return y
