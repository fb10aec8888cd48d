"""fp8 product with block scales: a program a tile of 128 x 128, masked pointers, sums scaled after each 128 of k."""

import torch
import triton
import triton.language as tl


@triton.jit
def product(
    x, w, y, scale_x, scale_w, M, N, K, BLOCKS, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    rows = x + m[:, None].to(tl.int64) * K
    columns = w + n[None, :].to(tl.int64) * K
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(BLOCKS):
        k = step * BK + depth
        a = tl.load(rows + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(columns + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
        scale = tl.load(scale_x + m * BLOCKS + step, mask=m < M, other=0.0)
        scale *= tl.load(scale_w + tl.program_id(1) * BLOCKS + step)
        acc += tl.dot(a, b) * scale[:, None]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def kernel_function(x, weight, scale_x, scale_w):
    (M, K), N = x.shape, len(weight)
    blocks, tiles = triton.cdiv(K, 128), triton.cdiv(N, 128)
    if weight.shape[1] != K or scale_x.shape != (M, blocks) or scale_w.shape != (tiles, blocks):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and the scales do not fit together")
    x, weight, scale_x, scale_w = (one.contiguous() for one in (x, weight, scale_x, scale_w))
    y = torch.empty(M, N, dtype=torch.bfloat16, device=x.device)
    grid = triton.cdiv(M, 128), tiles
    product[grid](
        x, weight, y, scale_x, scale_w, M, N, K, blocks, BM=128, BN=128, BK=128, num_warps=8, num_stages=3
    )  # fmt: skip
    return y
