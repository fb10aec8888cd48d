"""Matrix-vector product, loads running ahead: ROWS rows share each piece of the vector, K is split over programs, a second kernel adds the parts.

The parts are added in a fixed order, so the result is the same in every run.
"""

import torch
import triton
import triton.language as tl

ROWS, BLOCK, WARPS = 4, 2048, 8  # a tile: 4 rows of 4 KB; a thread holds 8 neighbouring columns of all 4 rows
STAGES = 5  # four tiles are on their way (cp.async into shared memory) while one is multiplied
PARTS = 32  # at most, of the inner dimension
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(A, B):
    if A.ndim != 2 or B.ndim != 2 or B.shape[1] != 1 or A.shape[1] != B.shape[0]:
        raise ValueError(f"expected (M, K) times (K, 1), not {tuple(A.shape)} times {tuple(B.shape)}")
    if A.dtype not in DTYPES or A.dtype != B.dtype or A.device != B.device:
        raise ValueError(f"expected one type of {DTYPES} on one device, not {A.dtype}, {B.dtype}")


@triton.jit
def products_of_part(a, b, sums, rows, columns, chunk, parts, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr):
    # neighbouring programs take neighbouring parts of the same rows: memory is read nearly in order
    block, part = tl.program_id(0) // parts, (tl.program_id(0) % parts).to(tl.int64)
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = part * chunk
    last = tl.minimum(first + chunk, columns)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        if EVEN:
            left = tl.load(a + row[:, None] * columns + column[None, :], eviction_policy="evict_first")
            right = tl.load(b + column, eviction_policy="evict_last")
        else:
            inside = column < last
            left = tl.load(a + row[:, None] * columns + column[None, :], mask=inside[None, :] & (row < rows)[:, None], other=0.0)
            right = tl.load(b + column, mask=inside, other=0.0)
        total += left.to(tl.float32) * right.to(tl.float32)[None, :]
    tl.store(sums + part * rows + row, tl.sum(total, 1), mask=row < rows)


@triton.jit
def add_parts(sums, out, rows, parts, PARTS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS).to(tl.int64)
    inside = (part < parts)[:, None] & (row < rows)[None, :]
    values = tl.load(sums + part[:, None] * rows + row[None, :], mask=inside, other=0.0)
    tl.store(out + row, tl.sum(values, 0).to(out.dtype.element_ty), mask=row < rows)


def split(columns):
    """The columns of one part (a multiple of BLOCK), and how many parts there are."""
    chunk = triton.cdiv(triton.cdiv(max(columns, 1), PARTS), BLOCK) * BLOCK
    return chunk, triton.cdiv(max(columns, 1), chunk)


def kernel_function(A, B):
    check(A, B)
    A, B = A.contiguous(), B.contiguous()
    rows, columns = A.shape
    out = torch.empty((rows, 1), dtype=A.dtype, device=A.device)
    if rows:
        chunk, parts = split(columns)
        sums = torch.empty((parts, rows), dtype=torch.float32, device=A.device)
        even = rows % ROWS == 0 and columns % BLOCK == 0
        programs = triton.cdiv(rows, ROWS) * parts
        products_of_part[(programs,)](A, B, sums, rows, columns, chunk, parts, ROWS=ROWS, BLOCK=BLOCK, STAGES=STAGES, EVEN=even, num_warps=WARPS)
        add_parts[(triton.cdiv(rows, 32),)](sums, out, rows, parts, PARTS=PARTS, ROWS=32, num_warps=4)
    return out
