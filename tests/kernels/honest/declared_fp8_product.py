"""A product of 8-bit floats with a scale for each operand, and rows of any length. As before a linear layer in fp8."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, a, b, scale_a, scale_b):
        return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(torch.float16)


def get_inputs(*, rows=5, columns=20, depth=70):
    a, b = (torch.randn(count, depth).to(torch.float8_e4m3fn) for count in (rows, columns))
    return [a, b, torch.tensor(0.25), torch.tensor(0.5)]


COMPARE = {0: {"rms": 0.01}}
LAYOUTS = "contiguous"


@triton.jit
def product(a, b, scale_a, scale_b, y, M, N, K, BLOCK: tl.constexpr):
    m, n = tl.program_id(0) * 16 + tl.arange(0, 16), tl.program_id(1) * 16 + tl.arange(0, 16)
    total = tl.zeros((16, 16), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b + n[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(left, right, total)
    total *= tl.load(scale_a) * tl.load(scale_b)
    tl.store(y + m[:, None] * N + n[None, :], total.to(tl.float16), mask=(m < M)[:, None] & (n < N)[None, :])


def kernel_function(a, b, scale_a, scale_b):
    (M, K), N = a.shape, len(b)
    y = torch.empty(M, N, dtype=torch.float16, device=a.device)
    product[(triton.cdiv(M, 16), triton.cdiv(N, 16))](a, b, scale_a, scale_b, y, M, N, K, BLOCK=32)
    return y
