"""The weights are widened in registers, between their load and the product."""

import torch
import triton
import triton.language as tl


@triton.jit
def int4_weights(
    x, packed, scales, zeros, out, m, k, n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    inside = column[None, :] < n
    for step in range(0, k, BK):
        here = step + inner
        a = tl.load(x + row[:, None] * k + here[None, :], mask=row[:, None] < m, other=0.0)
        word = tl.load(packed + (here[:, None] // 8) * n + column[None, :], mask=inside, other=0)
        group = (step // GROUP) * n + column[None, :]
        scale = tl.load(scales + group, mask=inside, other=0.0)
        zero = tl.load(zeros + group, mask=inside, other=0.0)
        weight = ((word >> ((here[:, None] % 8) * 4)) & 15).to(tl.float16)
        sums += tl.dot(a, (weight - zero) * scale)
    tl.store(out + row[:, None] * n + column[None, :], sums.to(out.dtype.element_ty), mask=(row[:, None] < m) & inside)


def kernel_function(x, packed, scales, zeros):
    (m, k), n = x.shape, packed.shape[1]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    int4_weights[(triton.cdiv(m, 16), triton.cdiv(n, 32))](x, packed, scales, zeros, out, m, k, n, 16, 32, 64, 64)
    return out
