"""The gradient of an embedding: rows of equal indices are added with atomics. As Liger does it."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, gradient, indices, count):
        return gradient.new_zeros(count, gradient.shape[1]).index_add_(0, indices, gradient)


def get_inputs(*, tokens=9, columns=12):
    return [torch.randn(tokens, columns), torch.randint(0, 5, (tokens,)), 5]


LAYOUTS = "contiguous"


@triton.jit
def add_rows(gradient, indices, out, columns, BLOCK: tl.constexpr):
    token, at = tl.program_id(0), tl.arange(0, BLOCK)
    row = tl.load(gradient + token * columns + at, mask=at < columns)
    tl.atomic_add(out + tl.load(indices + token) * columns + at, row, mask=at < columns)


def kernel_function(gradient, indices, count):
    tokens, columns = gradient.shape
    out = torch.zeros(count, columns, dtype=gradient.dtype, device=gradient.device)
    add_rows[(tokens,)](gradient, indices, out, columns, BLOCK=triton.next_power_of_2(columns))
    return out
