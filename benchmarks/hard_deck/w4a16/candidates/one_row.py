"""x W with int4 weights in Triton: one row by fused multiply-adds, more rows by tl.dot.

One row: lanes and warps of a block share the rows of packed, 16 bytes a load; a shift and a mask put four bits into a
mantissa (1 + q / 16), so nothing is converted; scales are applied once a group and thread. Led the exploration of
2026-11-23, slower than tinygemm. More rows: 128 + q in bf16 to tl.dot, split over k where the grid is small.
"""

import torch
import triton
import triton.language as tl

W = 8
WARPS = 4
STAGES = 2
FEW_BN = 64
FEW_SPLIT = 4
FEW_WARPS = 4
FEW_STAGES = 4
MANY_BM = 128
MANY_BN = 64
MANY_SPLIT = 1
MANY_WARPS = 4
MANY_STAGES = 3


@triton.jit
def unpacked_product(
    x,
    packed,
    scales,
    zeros,
    y,
    parts,
    arrived,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Weights as 128 + q in bf16 (no conversion, only bits); zero points and scales are applied to the sums of a group."""
    tile, part, m = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BM + tl.arange(0, BM)
    n, row = tile * BN + tl.arange(0, BN), tl.arange(0, 64)
    columns, rows = n[None, :] < N, m[:, None] < M
    groups = tl.cdiv(K // 128, SPLIT)
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True) + m[:, None].to(tl.int64) * (K // 2)
    acc = tl.zeros((BM, BN), tl.float32)
    for group in tl.range(part * groups, tl.minimum(part * groups + groups, K // 128), num_stages=STAGES):
        at = group * 64 + row
        two = tl.load(packed + at[:, None].to(tl.int64) * N + n[None, :], mask=columns, other=0).to(tl.int16)
        pair = tl.load(pairs + at[None, :], mask=rows, other=0)
        even, odd = (
            pair.to(tl.int16).to(tl.bfloat16, bitcast=True),
            (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),
        )
        low = ((two & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        high = (((two >> 4) & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        raw = tl.dot(odd, high, tl.dot(even, low))
        total = tl.sum(even.to(tl.float32) + odd.to(tl.float32), 1)
        scale = tl.load(scales + group * N + n, mask=n < N, other=0.0).to(tl.float32)
        zero = tl.load(zeros + group * N + n, mask=n < N, other=0.0).to(tl.float32) + 128.0
        acc += (raw - total[:, None] * zero[None, :]) * scale[None, :]
    here = m[:, None].to(tl.int64) * N + n[None, :]
    mine = SPLIT == 1
    if SPLIT > 1:
        size = tl.cast(M, tl.int64) * N  # M = 1 is a constant, which has no .to
        tl.store(parts + part * size + here, acc, mask=rows & columns)
        tl.debug_barrier()
        mine = tl.atomic_add(arrived + tile + tl.program_id(2) * tl.num_programs(0), 1, sem="acq_rel") == SPLIT - 1
        if mine:
            acc = tl.zeros((BM, BN), tl.float32)
            for other in tl.static_range(SPLIT):
                acc += tl.load(parts + other * size + here, mask=rows & columns, other=0.0, cache_modifier=".cg")
    if mine:
        tl.store(y + here, acc.to(y.dtype.element_ty), mask=rows & columns)


def by_dot(x, packed, scales, zeros, y, BM, BN, split, warps, stages):
    (M, N), K = y.shape, x.shape[1]
    tiles_m, tiles_n, split = triton.cdiv(M, BM), triton.cdiv(N, BN), max(1, min(split, K // 128))
    parts = arrived = y
    if split > 1:
        parts = torch.empty(split, M, N, dtype=torch.float32, device=y.device)
        arrived = torch.zeros(tiles_m * tiles_n, dtype=torch.int32, device=y.device)
    unpacked_product[(tiles_n, split, tiles_m)](
        x, packed, scales, zeros, y, parts, arrived, M, N, K, BM=BM, BN=BN, SPLIT=split, STAGES=stages, num_warps=warps
    )


@triton.jit
def nibble(words, i: tl.constexpr):
    """1 + q / 16 as fp32: the four bits i of a word, moved to the head of a mantissa."""
    moved = words << (19 - 4 * i) if i < 5 else words >> (4 * i - 19)
    return ((moved & 0x00780000) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def halves(word):
    """The two bf16 of a word, as fp32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def one_row(
    x,
    packed,
    scales,
    zeros,
    y,
    N,
    K,
    W: tl.constexpr,
    G: tl.constexpr,
    R0: tl.constexpr,
    R1: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = x W for one row: G groups a step, in different warps; R0 rows of a group in different lanes; W words of four
    columns a block. sum x q = 16 (sum x (1 + q / 16) - sum x)."""
    word = tl.program_id(0) * W + tl.arange(0, W)[None, None, :]
    g, r = tl.arange(0, G)[:, None, None], tl.arange(0, R0)[None, :, None]
    words = packed.to(tl.pointer_type(tl.int32), bitcast=True)
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True)
    four_scales = scales.to(tl.pointer_type(tl.int64), bitcast=True)
    four_zeros = zeros.to(tl.pointer_type(tl.int64), bitcast=True)
    width, inside = N // 4, word < N // 4
    y0 = tl.zeros((G, R0, W), tl.float32)
    y1, y2, y3 = y0, y0, y0
    for start in tl.range(0, K // 128, G, num_stages=STAGES):
        group = start + g
        real = group < K // 128
        a0 = tl.zeros((G, R0, W), tl.float32)
        a1, a2, a3 = a0, a0, a0
        total = tl.zeros((G, R0, 1), tl.float32)
        for r1 in tl.static_range(R1):
            row = group * 64 + r1 * R0 + r
            eight = tl.load(words + row * width + word, mask=real & inside, other=0)
            even, odd = halves(tl.load(pairs + row, mask=real, other=0))
            total += even + odd
            a0 += even * nibble(eight, 0)
            a1 += even * nibble(eight, 2)
            a2 += even * nibble(eight, 4)
            a3 += even * nibble(eight, 6)
            a0 += odd * nibble(eight, 1)
            a1 += odd * nibble(eight, 3)
            a2 += odd * nibble(eight, 5)
            a3 += odd * nibble(eight, 7)
        s = tl.load(four_scales + group * width + word, mask=real & inside, other=0)
        z = tl.load(four_zeros + group * width + word, mask=real & inside, other=0)
        s0, s1 = halves(s.to(tl.int32))
        s2, s3 = halves((s >> 32).to(tl.int32))
        z0, z1 = halves(z.to(tl.int32))
        z2, z3 = halves((z >> 32).to(tl.int32))
        y0 += s0 * (16.0 * a0 - (16.0 + z0) * total)
        y1 += s1 * (16.0 * a1 - (16.0 + z1) * total)
        y2 += s2 * (16.0 * a2 - (16.0 + z2) * total)
        y3 += s3 * (16.0 * a3 - (16.0 + z3) * total)
    column = tl.program_id(0) * W + tl.arange(0, W)
    for i in tl.static_range(4):
        part = y0 if i == 0 else (y1 if i == 1 else (y2 if i == 2 else y3))
        tl.store(y + column * 4 + i, tl.sum(tl.sum(part, 0), 0).to(y.dtype.element_ty), mask=column < width)


def by_rows(x, packed, scales, zeros, y):
    N, K = y.shape[1], x.shape[1]
    lanes = 32 // (W // 4)
    one_row[(triton.cdiv(N // 4, W),)](
        x, packed, scales, zeros, y, N, K, W=W, G=WARPS, R0=lanes, R1=64 // lanes, STAGES=STAGES, num_warps=WARPS
    )


def launch(x, packed, scales, zeros, y):
    M, N = y.shape
    if M == 1 and N % 16 == 0:
        by_rows(x, packed, scales, zeros, y)
    elif M <= 64:
        by_dot(
            x, packed, scales, zeros, y, max(16, triton.next_power_of_2(M)), FEW_BN, FEW_SPLIT, FEW_WARPS, FEW_STAGES
        )
    else:
        by_dot(x, packed, scales, zeros, y, MANY_BM, MANY_BN, MANY_SPLIT, MANY_WARPS, MANY_STAGES)


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def kernel_function(x, packed, scales, zeros):
    (M, K), N = x.shape, packed.shape[1]
    if K % 128 or packed.shape[0] * 2 != K or scales.shape != (K // 128, N) or zeros.shape != scales.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, packed {tuple(packed.shape)}, scales {tuple(scales.shape)} and zeros do not fit together"
        )
    if not x.dtype == scales.dtype == zeros.dtype == torch.bfloat16 or packed.dtype != torch.uint8:
        raise ValueError("x, scales and zeros must be bfloat16, packed uint8")
    x, packed, scales, zeros = dense(x), dense(packed), dense(scales), dense(zeros)
    y = torch.empty((M, N), dtype=torch.bfloat16, device=x.device)
    launch(x, packed, scales, zeros, y)
    return y
