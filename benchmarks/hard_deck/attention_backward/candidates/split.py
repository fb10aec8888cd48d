"""Causal attention backward, no atomics: dk and dv by blocks of keys (four products), dq by blocks of queries (three).

TMA descriptors over all rows of all heads; a mask on the diagonal alone; the longest blocks first, and few heads at a time,
whose tensors fit the L2. exp2 with the scale and log2(e) folded into one factor. Rows beyond the
end have a log-sum-exp of infinity, so their weights are 0, whatever the tile holds of the next head.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SPACE = [
    {"KEYS": 128, "QUERIES": 64, "STAGES": 2, "ROWS": 128, "COLUMNS": 64, "ROW_STAGES": 3, "WARPS": 8},
    {"KEYS": 128, "QUERIES": 64, "STAGES": 3, "ROWS": 128, "COLUMNS": 128, "ROW_STAGES": 2, "WARPS": 8},
    {"KEYS": 64, "QUERIES": 64, "STAGES": 2, "ROWS": 64, "COLUMNS": 64, "ROW_STAGES": 2, "WARPS": 4},
    {"KEYS": 128, "QUERIES": 64, "STAGES": 3, "ROWS": 128, "COLUMNS": 64, "ROW_STAGES": 3, "WARPS": 8, "HEADS": 16},
]
KEYS = 128  # a block of dk and dv
QUERIES = 64  # a step of it
STAGES = 2
ROWS = 128  # a block of dq
COLUMNS = 64  # a step of it
ROW_STAGES = 3
WARPS = 8
HEADS = 4  # that are walked together


@triton.jit
def row_values(out, dout, lse, delta, base2, TOTAL, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """delta, the sum of dout * out of a row, and the log-sum-exp to the base 2."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < TOTAL
    at = row[:, None].to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    a, b = tl.load(out + at, mask=inside[:, None], other=0.0), tl.load(dout + at, mask=inside[:, None], other=0.0)
    tl.store(delta + row, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), mask=inside)
    tl.store(base2 + row, tl.load(lse + row, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634, mask=inside)


@triton.jit
def place(heads, blocks, GROUP: tl.constexpr):
    """(head, number of the block): GROUP heads at a time, all first blocks of them before the second ones."""
    pid = tl.program_id(0)
    first = pid // (GROUP * blocks) * GROUP
    group = tl.minimum(heads - first, GROUP)
    within = pid % (GROUP * blocks)
    return first + within % group, within // group


@triton.jit
def dk_and_dv(
    q_tiles, do_tiles, k_tiles, v_tiles, delta, base2, dk, dv, heads, LENGTH, scale, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """All products are those of the transposed matrices. One loop: with the diagonal in a loop of its own, ptxas made the
    products of the other loop wait for each other."""
    head, block = place(heads, tl.cdiv(LENGTH, KEYS), GROUP)  # the first block of keys has the most queries
    row0, first = head * LENGTH, block * KEYS
    n = first + tl.arange(0, KEYS)
    keys, values = k_tiles.load([row0 + first, 0]), v_tiles.load([row0 + first, 0])
    of_keys, of_values = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
    factor = scale * 1.4426950408889634
    for start in tl.range(first, LENGTH, QUERIES, num_stages=STAGES):
        m = start + tl.arange(0, QUERIES)
        inside = m < LENGTH
        queries = q_tiles.load([row0 + start, 0])
        sums = tl.load(base2 + row0 + m, mask=inside, other=float("inf"))
        p = tl.math.exp2(tl.dot(keys, queries.T) * factor - sums[None, :])
        if start < first + KEYS:
            p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        of_out = do_tiles.load([row0 + start, 0])
        of_values = tl.dot(p.to(queries.dtype), of_out, of_values)
        means = tl.load(delta + row0 + m, mask=inside, other=0.0)
        ds = p * (tl.dot(values, of_out.T) - means[None, :])
        of_keys = tl.dot(ds.to(queries.dtype), queries, of_keys)
    at = (row0 + n).to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(dk + at, (of_keys * scale).to(dk.dtype.element_ty), mask=n[:, None] < LENGTH)
    tl.store(dv + at, of_values.to(dv.dtype.element_ty), mask=n[:, None] < LENGTH)


@triton.jit
def add_keys(
    of_queries, queries, of_out, sums, means, k_tiles, v_tiles, row0, begin, end, m, factor,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the keys from begin to end to dq."""
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        keys = k_tiles.load([row0 + start, 0])
        p = tl.math.exp2(tl.dot(queries, keys.T) * factor - sums[:, None])
        if MASKED:
            p = tl.where(m[:, None] >= start + tl.arange(0, COLUMNS)[None, :], p, 0.0)
        ds = p * (tl.dot(of_out, v_tiles.load([row0 + start, 0]).T) - means[:, None])
        of_queries = tl.dot(ds.to(queries.dtype), keys, of_queries)
    return of_queries


@triton.jit
def dq_alone(
    q_tiles, do_tiles, k_tiles, v_tiles, delta, base2, dq, heads, LENGTH, scale, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(LENGTH, ROWS)
    head, block = place(heads, blocks, GROUP)
    row0, first = head * LENGTH, (blocks - 1 - block) * ROWS  # the last block of queries has the most keys
    m = first + tl.arange(0, ROWS)
    queries, of_out = q_tiles.load([row0 + first, 0]), do_tiles.load([row0 + first, 0])
    sums = tl.load(base2 + row0 + m, mask=m < LENGTH, other=float("inf"))
    means = tl.load(delta + row0 + m, mask=m < LENGTH, other=0.0)
    of_queries = tl.zeros((ROWS, WIDTH), tl.float32)
    factor = scale * 1.4426950408889634
    full = first // COLUMNS * COLUMNS  # keys before are seen by all queries
    of_queries = add_keys(
        of_queries, queries, of_out, sums, means, k_tiles, v_tiles, row0, 0, full, m, factor, COLUMNS, False, STAGES
    )  # fmt: skip
    of_queries = add_keys(
        of_queries, queries, of_out, sums, means, k_tiles, v_tiles, row0, full, first + ROWS, m, factor, COLUMNS, True, 1
    )  # fmt: skip
    at = (row0 + m).to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(dq + at, (of_queries * scale).to(dq.dtype.element_ty), mask=m[:, None] < LENGTH)


def dense(x):
    """x, contiguous and at a multiple of 16 bytes: what TMA can address."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def kernel_function(q, k, v, out, lse, dout):
    batch, heads, length, width = q.shape
    if width not in (16, 32, 64, 128):
        raise ValueError("the kernel is written for a width of 16, 32, 64 or 128")
    if not q.dtype == k.dtype == v.dtype == dout.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError("q, k, v and dout must be of one 16-bit type")
    if lse.numel() >= 2**31 - 2**16:
        raise ValueError("there are too many rows")
    q, k, v, out, lse, dout = (dense(one) for one in (q, k, v, out, lse, dout))
    total, heads, scale = lse.numel(), batch * heads, width**-0.5
    delta, base2 = torch.empty((2, total), dtype=torch.float32, device=q.device)
    row_values[(triton.cdiv(total, 64),)](out, dout, lse, delta, base2, total, width, 64, num_warps=4)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def tiles(x, rows):
        return TensorDescriptor(x, [total, width], [width, 1], [rows, width])

    dk_and_dv[(heads * triton.cdiv(length, KEYS),)](
        tiles(q, QUERIES), tiles(dout, QUERIES), tiles(k, KEYS), tiles(v, KEYS), delta, base2, dk, dv, heads, length, scale,
        width, KEYS, QUERIES, STAGES, HEADS, num_warps=WARPS,
    )  # fmt: skip
    dq_alone[(heads * triton.cdiv(length, ROWS),)](
        tiles(q, ROWS), tiles(dout, ROWS), tiles(k, COLUMNS), tiles(v, COLUMNS), delta, base2, dq, heads, length, scale,
        width, ROWS, COLUMNS, ROW_STAGES, HEADS, num_warps=WARPS,
    )  # fmt: skip
    return dq, dk, dv
