"""LayerNorm with weight and bias: mean first, then the squares of what is left."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

EPSILON = 1e-5
LONGEST = 65536


class Model(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x):
        return nn.functional.layer_norm(x.contiguous(), self.weight.shape, self.weight, self.bias, EPSILON)


def get_inputs():
    return [torch.randn(7, 257)]


def get_init_inputs():
    return [257]


@triton.jit
def layer_norm(x, weight, bias, y, columns, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    value = tl.load(x + row * columns + offsets, mask=inside, other=0.0)
    mean = tl.sum(value, 0) / columns
    centred = tl.where(inside, value - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / columns
    gain = tl.load(weight + offsets, mask=inside)
    shift = tl.load(bias + offsets, mask=inside)
    tl.store(y + row * columns + offsets, centred / tl.sqrt(variance + epsilon) * gain + shift, mask=inside)


class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns))
        self.bias = nn.Parameter(torch.empty(columns))

    def forward(self, x):
        rows, columns = x.shape
        if columns != self.weight.numel():
            raise ValueError(f"x has {columns} columns, the weight has {self.weight.numel()}")
        if columns > LONGEST:
            raise ValueError(f"a row of {columns} elements does not fit into one block of {LONGEST}")
        y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        if y.numel():
            block = triton.next_power_of_2(columns)
            layer_norm[(rows,)](
                x.contiguous(), self.weight.contiguous(), self.bias.contiguous(), y, columns, EPSILON, BLOCK=block
            )
        return y
