"""Causal attention backward in one kernel: a block of keys keeps dk and dv and adds its part of dq in fp32 (five products).

dq is added to memory by TMA, a tile at a time, or by atomics of single numbers (BY_TMA 0; always so in the CPU interpreter,
which has no TMA reductions); a last kernel rounds it. Its bits differ from run to run. As in split.py: TMA descriptors over
all rows of all heads, a mask on the diagonal alone, the longest blocks first, few heads at a time, exp2 with a folded factor.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SPACE = [
    {"TURNED": 1, "KEYS": 128, "QUERIES": 64, "STAGES": 2, "WARPS": 8, "BY_TMA": 1},
    {"TURNED": 0, "KEYS": 64, "QUERIES": 128, "STAGES": 2, "WARPS": 8, "BY_TMA": 0},
    {"TURNED": 0, "KEYS": 64, "QUERIES": 128, "STAGES": 1, "WARPS": 8, "BY_TMA": 1},
    {"TURNED": 0, "KEYS": 64, "QUERIES": 64, "STAGES": 2, "WARPS": 4, "BY_TMA": 1},
]
KEYS = 128  # a block of dk and dv
QUERIES = 64  # a step of it
STAGES = 2
WARPS = 8
HEADS = 4  # that are walked together
BY_TMA = 1
TURNED = 1  # the keys are the rows of S and of dP


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
def gradients(
    q_tiles, do_tiles, k_tiles, v_tiles, sum_tiles, sums_of_dq, delta, base2, dk, dv, heads, LENGTH, scale,
    WIDTH: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    BY_TMA: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    head, block = place(heads, tl.cdiv(LENGTH, KEYS), GROUP)  # the first block of keys has the most queries
    row0, first = head * LENGTH, block * KEYS
    n = first + tl.arange(0, KEYS)
    keys, values = k_tiles.load([row0 + first, 0]), v_tiles.load([row0 + first, 0])
    of_keys, of_values = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
    factor = scale * 1.4426950408889634
    for start in tl.range(first, LENGTH, QUERIES, num_stages=STAGES):
        m = start + tl.arange(0, QUERIES)
        inside = m < LENGTH
        queries, of_out = q_tiles.load([row0 + start, 0]), do_tiles.load([row0 + start, 0])
        sums = tl.load(base2 + row0 + m, mask=inside, other=float("inf"))
        if TURNED:
            p = tl.math.exp2(tl.dot(keys, queries.T) * factor - sums[None, :])
            if start < first + KEYS:
                p = tl.where(m[None, :] >= n[:, None], p, 0.0)
            of_values = tl.dot(p.to(queries.dtype), of_out, of_values)
            means = tl.load(delta + row0 + m, mask=inside, other=0.0)
            ds = (p * (tl.dot(values, of_out.T) - means[None, :])).to(queries.dtype)
            of_keys = tl.dot(ds, queries, of_keys)
            part = tl.dot(ds.T, keys)
        else:
            p = tl.math.exp2(tl.dot(queries, keys.T) * factor - sums[:, None])
            if start < first + KEYS:
                p = tl.where(m[:, None] >= n[None, :], p, 0.0)
            of_values = tl.dot(p.to(queries.dtype).T, of_out, of_values)
            means = tl.load(delta + row0 + m, mask=inside, other=0.0)
            ds = (p * (tl.dot(of_out, values.T) - means[:, None])).to(queries.dtype)
            of_keys = tl.dot(ds.T, queries, of_keys)
            part = tl.dot(ds, keys)
        if BY_TMA:  # rows beyond the end add 0 to the next head
            sum_tiles.atomic_add([row0 + start, 0], part)
        else:
            at = (row0 + m).to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            tl.atomic_add(sums_of_dq + at, part, mask=inside[:, None], sem="relaxed")
    at = (row0 + n).to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(dk + at, (of_keys * scale).to(dk.dtype.element_ty), mask=n[:, None] < LENGTH)
    tl.store(dv + at, of_values.to(dv.dtype.element_ty), mask=n[:, None] < LENGTH)


@triton.jit
def rounded(sums, y, scale, COUNT, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, (tl.load(sums + at, mask=at < COUNT) * scale).to(y.dtype.element_ty), mask=at < COUNT)


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

    sums_of_dq = torch.zeros_like(q, dtype=torch.float32)
    gradients[(heads * triton.cdiv(length, KEYS),)](
        tiles(q, QUERIES), tiles(dout, QUERIES), tiles(k, KEYS), tiles(v, KEYS), tiles(sums_of_dq, QUERIES), sums_of_dq,
        delta, base2, dk, dv, heads, length, scale, width, KEYS, QUERIES, STAGES, HEADS, bool(BY_TMA and q.is_cuda),
        TURNED, num_warps=WARPS,
    )  # fmt: skip
    rounded[(triton.cdiv(q.numel(), 4096),)](sums_of_dq, dq, scale, q.numel(), 4096, num_warps=8)
    return dq, dk, dv
