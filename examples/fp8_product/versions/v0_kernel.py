"""fp8 product, one scale a tensor: a program a tile of 128 x 128, masked pointers, e4m3 operands to tl.dot."""

import torch
import triton
import triton.language as tl


@triton.jit
def product(x, w, y, scale_x, scale_w, PER_ROW, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    rows = x + m[:, None].to(tl.int64) * K
    columns = w + n[None, :].to(tl.int64) * K
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + depth
        a = tl.load(rows + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(columns + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
        acc = tl.dot(a, b, acc)
    scale = tl.load(scale_x) * tl.load(scale_w + n * PER_ROW, mask=n < N, other=0.0)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y + at, (acc * scale[None, :]).to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def kernel_function(x, weight, scale_x, scale_w):
    (M, K), N = x.shape, len(weight)
    if weight.shape[1] != K or scale_x.numel() != 1 or scale_w.numel() not in (1, N):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and the scales do not fit together")
    x, weight, scale_w = x.contiguous(), weight.contiguous(), scale_w.contiguous()
    y = torch.empty(M, N, dtype=torch.bfloat16, device=x.device)
    grid = triton.cdiv(M, 128), triton.cdiv(N, 128)
    per_row = int(scale_w.numel() > 1)
    product[grid](x, weight, y, scale_x, scale_w, per_row, M, N, K, BM=128, BN=128, BK=128, num_warps=8, num_stages=3)
    return y
