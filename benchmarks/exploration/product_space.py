"""24 variants of one Triton product: tile sizes, warps and pipeline stages."""

import torch
import triton
import triton.language as tl

SPACE = {"BLOCK_M": [64, 128], "BLOCK_N": [128, 256], "BLOCK_K": [32, 64], "STAGES": [2, 3, 4]}
BLOCK_M = 128
BLOCK_N = 128
BLOCK_K = 64
STAGES = 3
GROUP = 8


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * columns) * GROUP
    size = min(rows - first, GROUP)
    row, column = first + pid % (GROUP * columns) % size, pid % (GROUP * columns) // size
    m, n, k = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + start + k[None, :], (m[:, None] < M) & (start + k[None, :] < K), 0.0)
        right = tl.load(b + (start + k[:, None]) * N + n[None, :], (n[None, :] < N) & (start + k[:, None] < K), 0.0)
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * N + n[None, :], total.to(tl.bfloat16), (m[:, None] < M) & (n[None, :] < N))


def kernel_function(a, b):
    a, b = a.contiguous(), b.contiguous()
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    product[grid](a, b, c, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, num_warps=8, num_stages=STAGES)
    return c
