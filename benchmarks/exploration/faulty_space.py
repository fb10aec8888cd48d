"""12 variants of one RMSNorm, as an exploration meets them: seven are right, three wrong, one hangs, one does not
compile."""

import torch
import triton
import triton.language as tl

SPACE = [
    {"WARPS": 2},
    {"WARPS": 4},
    {"WARPS": 8},
    {"WARPS": 16},
    {"ROWS": 2, "WARPS": 4},
    {"ROWS": 2, "WARPS": 8},
    {"ROWS": 2, "WARPS": 16},
    {"FAULT": "leaves out the last columns"},
    {"FAULT": "forgets the weight"},
    {"FAULT": "stores to the next row"},
    {"FAULT": "hangs"},
    {"FAULT": "does not compile"},
]
ROWS = 1
WARPS = 8
FAULT = ""


@triton.jit
def rmsnorm(x, weight, y, n_rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FAULT: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows[:, None] < n_rows) & (columns[None, :] < COLUMNS)
    if FAULT == "leaves out the last columns":
        inside = inside & (columns[None, :] < COLUMNS - 8)
    if FAULT == "does not compile":
        columns += tl.arange(0, 3)
    if FAULT == "hangs":
        while tl.load(weight, volatile=True) < 1e30:
            rows += 0
    offsets = rows[:, None].to(tl.int64) * COLUMNS + columns[None, :]
    values = tl.load(x + offsets, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / COLUMNS + 1e-6)
    factor = tl.load(weight + columns, columns < COLUMNS, 0.0).to(tl.float32)
    if FAULT == "forgets the weight":
        factor = factor * 0 + 1
    if FAULT == "stores to the next row":
        rows = (rows + 1) % n_rows
    offsets = rows[:, None].to(tl.int64) * COLUMNS + columns[None, :]
    tl.store(y + offsets, (values * scale[:, None] * factor[None, :]).to(tl.bfloat16), inside)


def kernel_function(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    y = torch.empty_like(x)
    grid = (triton.cdiv(rows, ROWS),)
    block = triton.next_power_of_2(columns)
    rmsnorm[grid](x, weight, y, rows, columns, block, ROWS, FAULT, num_warps=WARPS)
    return y
