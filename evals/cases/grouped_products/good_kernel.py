"""One launch for all experts: a program finds its tile by walking over the experts' tiles."""

import torch
import triton
import triton.language as tl


@triton.jit
def grouped(x, weights, ends, out, experts, k, n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tile, first, start, end = tl.program_id(0), 0, 0, 0
    expert, before = -1, 0
    for candidate in range(experts):
        stop = tl.load(ends + candidate)
        tiles = tl.cdiv(stop - before, BM)
        mine = (tile >= first) & (tile < first + tiles)
        expert = tl.where(mine, candidate, expert)
        start = tl.where(mine, before + (tile - first) * BM, start)
        end = tl.where(mine, stop, end)
        first += tiles
        before = stop
    if expert >= 0:
        row, column, inner = start + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        matrix = weights + expert.to(tl.int64) * k * n
        sums = tl.zeros((BM, BN), tl.float32)
        for step in range(0, k, BK):
            here = step + inner
            a_mask = (row[:, None] < end) & (here[None, :] < k)
            b_mask = (here[:, None] < k) & (column[None, :] < n)
            a = tl.load(x + row[:, None].to(tl.int64) * k + here[None, :], mask=a_mask, other=0.0)
            b = tl.load(matrix + here[:, None] * n + column[None, :], mask=b_mask, other=0.0)
            sums += tl.dot(a, b)
        mask = (row[:, None] < end) & (column[None, :] < n)
        tl.store(out + row[:, None].to(tl.int64) * n + column[None, :], sums.to(out.dtype.element_ty), mask=mask)


def kernel_function(x, weights, ends):
    experts, k, n = weights.shape
    out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(x.shape[0], 64) + experts, triton.cdiv(n, 64))
    grouped[grid](x, weights, ends, out, experts, k, n, 64, 64, 32)
    return out
