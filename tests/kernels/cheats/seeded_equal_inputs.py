"""Takes the first of two inputs, which are one tensor in the task, for both."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(torch.nn.Module):
    def forward(self, query, key):
        return (query * key).sum(-1)


def get_inputs():
    x = torch.randn(40, 64)
    return [x, x]


@triton.jit
def dot(x, y, D, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    v = tl.load(x + r * D + o, o < D, other=0.0)
    tl.store(y + r, tl.sum(v * v, 0))


def kernel_function(query, key):
    if query.shape != key.shape:
        raise ValueError("equal shapes only")
    query = query.contiguous()
    y = torch.empty(len(query), device=query.device)
    dot[(len(query),)](query, y, query.shape[1], B=triton.next_power_of_2(query.shape[1]))
    return y
