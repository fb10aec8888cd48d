"""x W with int4 weights: a program a tile, the weights unpacked to bf16 for the tensor cores, whatever M is."""

import torch
import triton
import triton.language as tl


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


def launch(x, packed, scales, zeros, y):
    by_dot(x, packed, scales, zeros, y, 16, 64, 1, 4, 3)


def kernel_function(x, packed, scales, zeros):
    (M, K), N = x.shape, packed.shape[1]
    if K % 128 or packed.shape[0] * 2 != K or scales.shape != (K // 128, N) or zeros.shape != scales.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, packed {tuple(packed.shape)}, scales {tuple(scales.shape)} and zeros do not fit together"
        )
    if any(t.dtype != torch.bfloat16 for t in (x, scales, zeros)):
        raise ValueError("x, scales and zeros must be bfloat16")
    x, packed, scales, zeros = x.contiguous(), packed.contiguous(), scales.contiguous(), zeros.contiguous()
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    launch(x, packed, scales, zeros, y)
    return y
