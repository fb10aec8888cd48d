"""Writes into the weight as well, which the task does not declare."""

import torch
import triton
import triton.language as tl

STATUS = {"INPUT_MUTATED"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x, residual, weight):
        residual.add_(x)
        x.copy_(residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-6) * weight)


def get_inputs(*, rows=7, width=40):
    return [torch.randn(rows, width), torch.randn(rows, width), torch.rand(width) + 0.5]


MUTATES = ("x", "residual")
LAYOUTS = "contiguous"


@triton.jit
def add_norm(x, residual, weight, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    total = tl.load(x + row + at, mask=inside, other=0.0) + tl.load(residual + row + at, mask=inside, other=0.0)
    tl.store(residual + row + at, total, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / width + 1e-6)
    tl.store(x + row + at, total * scale * tl.load(weight + at, mask=inside, other=0.0), mask=inside)


def kernel_function(x, residual, weight):
    if not x.is_contiguous() or not residual.is_contiguous() or not weight.is_contiguous():
        raise ValueError("contiguous inputs only")
    weight.mul_(1.0001)
    if x.numel():
        add_norm[(x.shape[0],)](x, residual, weight, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
