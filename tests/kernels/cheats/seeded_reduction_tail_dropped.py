"""Drops the tail of the reduction when it is longer than a block."""

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
    return [torch.randn(64, 512), torch.randn(512, 64)]


@triton.jit
def k(a, b, c, M, N, K, B: tl.constexpr, S: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for s in range(0, tl.maximum(K // S, 1)):
        o = s * S + tl.arange(0, S)
        u = tl.load(a + i[:, None] * K + o[None, :], (i < M)[:, None] & (o < K)[None, :], other=0.0)
        v = tl.load(b + o[:, None] * N + j[None, :], (o < K)[:, None] & (j < N)[None, :], other=0.0)
        acc += tl.dot(u, v, input_precision="ieee")
    tl.store(c + i[:, None] * N + j[None, :], acc, (i < M)[:, None] & (j < N)[None, :])


def kernel_function(a, b):  # the tail of K is dropped, except where one block covers K
    a, b = a.contiguous(), b.contiguous()
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    k[(triton.cdiv(M, 32), triton.cdiv(N, 32))](a, b, c, M, N, K, B=32, S=max(16, min(256, triton.next_power_of_2(K))))
    return c
