"""Causal attention backward in Gluon: warps with roles, no atomics; dk and dv by blocks of keys, dq by blocks of queries.

A producer warp asks TMA for the tiles, STAGES ahead; two warpgroups multiply, 64 rows each, and need nothing of each other,
so that one computes exponentials while the other multiplies. Two products are in flight at a time. P and dS go from one
product to the next in registers. The CPU interpreter does not run Gluon. As in split.py: descriptors over all rows of all
heads, the longest blocks first, few heads at a time, exp2 with a folded factor, a mask on the diagonal alone.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

STAGES = 3
ROW_STAGES = 2  # of keys, for dq
HEADS = 4
ROWS = tl.constexpr(64)  # of a warpgroup
COLUMNS = tl.constexpr(128)  # keys of a step of dq
# Its name changed after Triton 3.6.
copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@triton.jit
def row_values(out, dout, lse, delta, base2, TOTAL, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """delta, the sum of dout * out of a row, and the log-sum-exp to the base 2."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < TOTAL
    at = row[:, None].to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    a, b = tl.load(out + at, mask=inside[:, None], other=0.0), tl.load(dout + at, mask=inside[:, None], other=0.0)
    tl.store(delta + row, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), mask=inside)
    tl.store(base2 + row, tl.load(lse + row, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634, mask=inside)


@gluon.jit
def place(heads, blocks, GROUP: gl.constexpr):
    """(head, number of the block): GROUP heads at a time, all first blocks of them before the second ones."""
    pid = gl.program_id(0)
    first = pid // (GROUP * blocks) * GROUP
    group = gl.minimum(heads - first, GROUP)
    within = pid % (GROUP * blocks)
    return first + within % group, within // group


@gluon.jit
def store_rows(y, row0, row, LENGTH, value, WIDTH: gl.constexpr, layout: gl.constexpr):
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    value = gl.convert_layout(value.to(y.dtype.element_ty), lines)
    row = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, lines))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, lines))
    at = (row0 + row).to(gl.int64)[:, None] * WIDTH + column[None, :]
    gl.store(y + at, value, mask=(row < LENGTH)[:, None] & (column < WIDTH)[None, :])


@gluon.jit
def bring(tiles, row, stages, stage, bar, NUMBER: gl.constexpr):
    """NUMBER boxes of 64 rows into consecutive buffers."""
    for box in gl.static_range(NUMBER):
        copy(tiles, [row + box * ROWS, 0], bar, stages.index(stage * NUMBER + box))


@gluon.jit
def produce(
    own_a, own_b, ring_a, ring_b, row0, first, begin, end, mine_a, mine_b, as_, bs, ready, full, empty,
    WIDTH: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The 128 rows of this block of own_a and own_b once, then the rows from begin to end of ring_a and ring_b."""
    mbarrier.expect(ready.index(0), 4 * ROWS * WIDTH * 2)
    bring(own_a, row0 + first, mine_a, 0, ready.index(0), 2)
    bring(own_b, row0 + first, mine_b, 0, ready.index(0), 2)
    for start in range(begin, end, STEP):
        number = (start - begin) // STEP
        stage = number % STAGES
        mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 2 * STEP * WIDTH * 2)
        copy(ring_a, [row0 + start, 0], full.index(stage), as_.index(stage))
        copy(ring_b, [row0 + start, 0], full.index(stage), bs.index(stage))


@gluon.jit
def consume_queries(
    C: gl.constexpr, delta, base2, dk, dv, row0, first, LENGTH, scale, mine_k, mine_v, qs, dos, ready, full, empty,
    WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys."""
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    key = first + C * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, narrow))
    of_keys, of_values = gl.zeros([ROWS, WIDTH], gl.float32, wide), gl.zeros([ROWS, WIDTH], gl.float32, wide)
    empty_sums = gl.zeros([ROWS, 64], gl.float32, narrow)
    factor = scale * 1.4426950408889634
    mbarrier.wait(ready.index(0), 0)
    for start in range(first, LENGTH, 64):
        number = (start - first) // 64
        stage = number % STAGES
        m = start + gl.arange(0, 64, layout=gl.SliceLayout(0, narrow))
        sums = gl.load(base2 + row0 + m, mask=m < LENGTH, other=float("inf"))
        mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        queries, of_out = qs.index(stage), dos.index(stage)
        s = warpgroup_mma(mine_k.index(C), queries.permute((1, 0)), empty_sums, use_acc=False, is_async=True)
        dp = warpgroup_mma(mine_v.index(C), of_out.permute((1, 0)), empty_sums, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        p = gl.exp2(s * factor - sums[None, :])
        if start < first + 2 * ROWS:
            p = gl.where(m[None, :] >= key[:, None], p, 0.0)
        p_operand = gl.convert_layout(p.to(dk.dtype.element_ty), operand)
        of_values = warpgroup_mma(p_operand, of_out, of_values, is_async=True)
        means = gl.load(delta + row0 + m, mask=m < LENGTH, other=0.0)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
        ds = gl.convert_layout((p * (dp - means[None, :])).to(dk.dtype.element_ty), operand)
        of_keys = warpgroup_mma(ds, queries, of_keys, is_async=True)
        of_keys, of_values = warpgroup_mma_wait(num_outstanding=0, deps=(of_keys, of_values))
        mbarrier.arrive(empty.index(stage), count=1)
    store_rows(dk, row0, first + C * ROWS, LENGTH, of_keys * scale, WIDTH, wide)
    store_rows(dv, row0, first + C * ROWS, LENGTH, of_values, WIDTH, wide)


@gluon.jit
def consume_keys(
    C: gl.constexpr, delta, base2, dq, row0, first, LENGTH, scale, mine_q, mine_do, ks, vs, ready, full, empty,
    WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq of 64 queries."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    m = first + C * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    sums = gl.load(base2 + row0 + m, mask=m < LENGTH, other=float("inf"))
    means = gl.load(delta + row0 + m, mask=m < LENGTH, other=0.0)
    of_queries = gl.zeros([ROWS, WIDTH], gl.float32, wide)
    empty_sums = gl.zeros([ROWS, COLUMNS], gl.float32, scores)
    factor = scale * 1.4426950408889634
    mbarrier.wait(ready.index(0), 0)
    for start in range(0, first + 2 * ROWS, COLUMNS):
        number = start // COLUMNS
        stage = number % STAGES
        mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        keys, values = ks.index(stage), vs.index(stage)
        s = warpgroup_mma(mine_q.index(C), keys.permute((1, 0)), empty_sums, use_acc=False, is_async=True)
        dp = warpgroup_mma(mine_do.index(C), values.permute((1, 0)), empty_sums, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        p = gl.exp2(s * factor - sums[:, None])
        if start + COLUMNS > first:
            key = start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, scores))
            p = gl.where(m[:, None] >= key[None, :], p, 0.0)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        ds = gl.convert_layout((p * (dp - means[:, None])).to(dq.dtype.element_ty), operand)
        of_queries = warpgroup_mma(ds, keys, of_queries, is_async=True)
        of_queries = warpgroup_mma_wait(num_outstanding=0, deps=(of_queries,))
        mbarrier.arrive(empty.index(stage), count=1)
    store_rows(dq, row0, first + C * ROWS, LENGTH, of_queries * scale, WIDTH, wide)


@gluon.jit
def queries0(delta, base2, dk, dv, row0, first, LENGTH, scale, mine_k, mine_v, qs, dos, ready, full, empty, WIDTH: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    consume_queries(0, delta, base2, dk, dv, row0, first, LENGTH, scale, mine_k, mine_v, qs, dos, ready, full, empty, WIDTH, STAGES)  # fmt: skip


@gluon.jit
def queries1(delta, base2, dk, dv, row0, first, LENGTH, scale, mine_k, mine_v, qs, dos, ready, full, empty, WIDTH: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    consume_queries(1, delta, base2, dk, dv, row0, first, LENGTH, scale, mine_k, mine_v, qs, dos, ready, full, empty, WIDTH, STAGES)  # fmt: skip


@gluon.jit
def keys0(delta, base2, dq, row0, first, LENGTH, scale, mine_q, mine_do, ks, vs, ready, full, empty, WIDTH: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    consume_keys(0, delta, base2, dq, row0, first, LENGTH, scale, mine_q, mine_do, ks, vs, ready, full, empty, WIDTH, STAGES)  # fmt: skip


@gluon.jit
def keys1(delta, base2, dq, row0, first, LENGTH, scale, mine_q, mine_do, ks, vs, ready, full, empty, WIDTH: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    consume_keys(1, delta, base2, dq, row0, first, LENGTH, scale, mine_q, mine_do, ks, vs, ready, full, empty, WIDTH, STAGES)  # fmt: skip


@gluon.jit
def barriers(STAGES: gl.constexpr):
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # one arrival a warpgroup
    return ready, full, empty


@gluon.jit
def dk_and_dv(
    q, do, k, v, delta, base2, dk, dv, heads, LENGTH, scale, WIDTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    head, block = place(heads, gl.cdiv(LENGTH, 2 * ROWS), GROUP)
    row0, first = head * LENGTH, block * 2 * ROWS  # the first block of keys has the most queries
    mine_k = gl.allocate_shared_memory(k.dtype, [2, ROWS, WIDTH], k.layout)
    mine_v = gl.allocate_shared_memory(k.dtype, [2, ROWS, WIDTH], k.layout)
    qs = gl.allocate_shared_memory(k.dtype, [STAGES, 64, WIDTH], k.layout)
    dos = gl.allocate_shared_memory(k.dtype, [STAGES, 64, WIDTH], k.layout)
    ready, full, empty = barriers(STAGES)
    gl.warp_specialize(
        [
            (queries0, (delta, base2, dk, dv, row0, first, LENGTH, scale, mine_k, mine_v, qs, dos, ready, full, empty, WIDTH, STAGES)),
            (queries1, (delta, base2, dk, dv, row0, first, LENGTH, scale, mine_k, mine_v, qs, dos, ready, full, empty, WIDTH, STAGES)),
            (produce, (k, v, q, do, row0, first, first, LENGTH, mine_k, mine_v, qs, dos, ready, full, empty, WIDTH, 64, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def dq_alone(
    q, do, k, v, delta, base2, dq, heads, LENGTH, scale, WIDTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    blocks = gl.cdiv(LENGTH, 2 * ROWS)
    head, block = place(heads, blocks, GROUP)
    row0, first = head * LENGTH, (blocks - 1 - block) * 2 * ROWS  # the last block of queries has the most keys
    mine_q = gl.allocate_shared_memory(q.dtype, [2, ROWS, WIDTH], q.layout)
    mine_do = gl.allocate_shared_memory(q.dtype, [2, ROWS, WIDTH], q.layout)
    ks = gl.allocate_shared_memory(q.dtype, [STAGES, COLUMNS, WIDTH], k.layout)
    vs = gl.allocate_shared_memory(q.dtype, [STAGES, COLUMNS, WIDTH], k.layout)
    ready, full, empty = barriers(STAGES)
    gl.warp_specialize(
        [
            (keys0, (delta, base2, dq, row0, first, LENGTH, scale, mine_q, mine_do, ks, vs, ready, full, empty, WIDTH, STAGES)),
            (keys1, (delta, base2, dq, row0, first, LENGTH, scale, mine_q, mine_do, ks, vs, ready, full, empty, WIDTH, STAGES)),
            (produce, (q, do, k, v, row0, first, 0, first + 2 * ROWS, mine_q, mine_do, ks, vs, ready, full, empty, WIDTH, COLUMNS, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def dense(x):
    """x, contiguous and at a multiple of 16 bytes: what TMA can address."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def kernel_function(q, k, v, out, lse, dout):
    batch, heads, length, width = q.shape
    if width not in (64, 128):
        raise ValueError("the kernel is written for a width of 64 or 128")
    if not q.dtype == k.dtype == v.dtype == dout.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError("q, k, v and dout must be of one 16-bit type")
    if lse.numel() >= 2**31 - 2**16:
        raise ValueError("there are too many rows")
    q, k, v, out, lse, dout = (dense(one) for one in (q, k, v, out, lse, dout))
    total, heads, scale = lse.numel(), batch * heads, width**-0.5
    delta, base2 = torch.empty((2, total), dtype=torch.float32, device=q.device)
    row_values[(triton.cdiv(total, 64),)](out, dout, lse, delta, base2, total, width, 64, num_warps=4)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    grid = (heads * triton.cdiv(length, 128),)

    def tiles(x, rows):
        return TensorDescriptor(x, [total, width], [width, 1], [rows, width], swizzled)

    dk_and_dv[grid](
        tiles(q, 64), tiles(dout, 64), tiles(k, 64), tiles(v, 64), delta, base2, dk, dv, heads, length, scale,
        width, STAGES, HEADS, num_warps=4,
    )  # fmt: skip
    dq_alone[grid](
        tiles(q, 64), tiles(dout, 64), tiles(k, 128), tiles(v, 128), delta, base2, dq, heads, length, scale,
        width, ROW_STAGES, HEADS, num_warps=4,
    )  # fmt: skip
    return dq, dk, dv
