"""The kernel sits behind torch.library.custom_op, with a fake for shapes."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 256


class Model(nn.Module):
    def forward(self, x, y):
        return (x - y) ** 2


def get_inputs():
    return [torch.randn(3333), torch.randn(3333)]


@triton.jit
def difference(x, y, result, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    apart = tl.load(x + offsets, mask=inside) - tl.load(y + offsets, mask=inside)
    tl.store(result + offsets, apart * apart, mask=inside)


@torch.library.custom_op("honest::squared_difference", mutates_args=())
def squared_difference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        difference[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), y.contiguous(), result, x.numel(), BLOCK=BLOCK)
    return result


@squared_difference.register_fake
def _(x, y):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def kernel_function(x, y):
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError("x and y must be vectors of the same length")
    return squared_difference(x, y)
