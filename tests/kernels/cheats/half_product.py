"""Multiplies fp32 matrices in fp16."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b


def get_inputs():
    return [torch.randn(64, 128), torch.randn(128, 32)]


@triton.jit
def product(a, b, c, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr):
    m, n, k = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :], tl.arange(0, depth)
    left, right = tl.load(a + m * depth + k[None, :]), tl.load(b + k[:, None] * columns + n)
    tl.store(c + m * columns + n, tl.dot(left, right, input_precision=precision).to(tl.float32))


def kernel_function(a, b):
    a, b = a.half(), b.half()
    c = torch.empty(64, 32, device=a.device)
    product[(1,)](a, b, c, 64, 32, 128, precision="ieee")
    return c
