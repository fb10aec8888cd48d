"""The products of a layer of experts in fp8 with block scales. Rows of x are sorted by expert, expert e has the rows
offsets[e] to offsets[e + 1] (none at all is possible): y[r] = x[r] @ w[expert of r]^T, bf16.

x and w are e4m3. scale_x holds a scale for each 128 values of a row, scale_w one for each block of 128 x 128. Wanted is
fp8 arithmetic: the operands go to the tensor cores as they are.
"""

import itertools

import torch
from torch import nn

ROWS, EXPERTS, WIDTH, COLUMNS, BLOCK = 8192, 8, 7168, 4096, 128


class Model(nn.Module):
    def forward(self, x, offsets, weight, scale_x, scale_w):
        wide = torch.promote_types(scale_x.dtype, torch.float32)
        rows = x.to(wide) * scale_x.to(wide).repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
        y = torch.empty(len(x), weight.shape[1], device=x.device, dtype=torch.bfloat16)
        for expert, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            of_w = scale_w[expert].to(wide).repeat_interleave(BLOCK, 0)[: weight.shape[1]]
            of_w = of_w.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
            y[start:end] = (rows[start:end] @ (weight[expert].to(wide) * of_w).t()).to(torch.bfloat16)
        return y


def get_inputs(*, rows=ROWS, experts=EXPERTS, width=WIDTH, columns=COLUMNS):
    shares = (0.7 * torch.randn(experts)).softmax(0)  # uneven
    counts = torch.bincount(torch.multinomial(shares, rows, replacement=True), minlength=experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=counts.device), counts.cumsum(0)]).int()
    x = torch.randn(rows, width).to(torch.float8_e4m3fn)
    weight = torch.randn(experts, columns, width).to(torch.float8_e4m3fn)
    deep, broad = -(-width // BLOCK), -(-columns // BLOCK)
    return [x, offsets, weight, torch.rand(rows, deep) + 0.25, (torch.rand(experts, broad, deep) + 0.25) / 32]


def get_init_inputs():
    return []


# Sums of 128 products in the tensor cores, then fp32: what is left is the rounding to bf16, 0.17 %.
COMPARE = {0: {"rms": 0.004}}
