"""A product with 4-bit weights, two in a byte, a scale and a zero point for each column and group of 32. As AWQ's."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x, packed, scales, zeros):
        values = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1).to(x.dtype)
        return x @ ((values - zeros.repeat_interleave(32, 0)) * scales.repeat_interleave(32, 0))


def get_inputs(*, rows=3, columns=20, depth=96):
    if depth % 32:
        raise ValueError("the depth is made of whole groups of 32")
    packed = torch.randint(0, 256, (depth // 2, columns), dtype=torch.uint8)
    scales = (0.5 + torch.rand(depth // 32, columns)).half()
    zeros = torch.randint(0, 16, (depth // 32, columns)).half()
    return [torch.randn(rows, depth, dtype=torch.float16), packed, scales, zeros]


LAYOUTS = "contiguous"


@triton.jit
def product(x, packed, scales, zeros, y, N, K, BLOCK: tl.constexpr):
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for group in range(K // 32):
        row = group * 16 + tl.arange(0, 16)
        two = tl.load(packed + row[:, None] * N + n[None, :], mask=(n < N)[None, :], other=0)
        even = tl.load(x + m * K + 2 * row).to(tl.float32)
        odd = tl.load(x + m * K + 2 * row + 1).to(tl.float32)
        raw = tl.sum((two & 15).to(tl.float32) * even[:, None] + (two >> 4).to(tl.float32) * odd[:, None], 0)
        zero = tl.load(zeros + group * N + n, mask=n < N, other=0.0).to(tl.float32)
        scale = tl.load(scales + group * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += (raw - tl.sum(even + odd, 0) * zero) * scale
    tl.store(y + m * N + n, total.to(y.dtype.element_ty), mask=n < N)


def kernel_function(x, packed, scales, zeros):
    (M, K), N = x.shape, packed.shape[1]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    product[(M, triton.cdiv(N, 16))](x, packed, scales, zeros, y, N, K, BLOCK=16)
    return y
