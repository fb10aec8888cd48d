"""Sums an fp32 row in an fp16 accumulator."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return x.sum(dim=-1)


def get_inputs():
    return [torch.randn(33, 64)]


@triton.jit
def row_sums(x, y, n: tl.constexpr):
    row = tl.program_id(0)
    tl.store(y + row, tl.sum(tl.load(x + row * n + tl.arange(0, n)).to(tl.float16), axis=0).to(tl.float32))


def kernel_function(x):
    y = torch.empty(x.shape[0], device=x.device)
    row_sums[(x.shape[0],)](x, y, x.shape[1])
    return y
