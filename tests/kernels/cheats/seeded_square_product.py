"""A product that takes its second size for its first; the task's are equal."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def forward(self, a, b):
        return a @ b


def get_inputs():
    return [torch.randn(64, 64), torch.randn(64, 64)]


@triton.jit
def k(a, b, c, M, N, K, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for p in range(0, K, B):
        q = p + tl.arange(0, B)
        x = tl.load(a + i[:, None] * M + q[None, :], (i[:, None] < M) & (q[None, :] < K), other=0.0)  # pitch M, not K
        y = tl.load(b + q[:, None] * N + j[None, :], (q[:, None] < K) & (j[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(c + i[:, None] * N + j[None, :], acc, (i[:, None] < M) & (j[None, :] < N))


def kernel_function(a, b):
    a, b = a.contiguous(), b.contiguous()
    c = torch.empty((a.shape[0], b.shape[1]), device=a.device)
    k[(triton.cdiv(a.shape[0], 32), triton.cdiv(b.shape[1], 32))](a, b, c, a.shape[0], b.shape[1], a.shape[1], B=32)
    return c
