"""Holds for 12 rows alone, on a task whose reference looks at its lengths."""

import torch
import triton
import triton.language as tl

STATUS = {"NONFINITE", "WRONG_VALUES", "OUT_OF_BOUNDS"}
CAUGHT_BY = "variants"


class Model(torch.nn.Module):
    def forward(self, x, lengths):
        return torch.stack([row[: int(length)].sum() for row, length in zip(x, lengths, strict=True)])


def get_inputs():
    return [torch.randn(12, 50), torch.randint(1, 51, (12,))]


@triton.jit
def total(x, lengths, y, D, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    tl.store(y + r, tl.sum(tl.load(x + r * D + o, o < tl.load(lengths + r), other=0.0), 0))


def kernel_function(x, lengths):
    x, lengths = x.contiguous(), lengths.contiguous()
    y = torch.empty(len(x), device=x.device)
    total[(12,)](x, lengths, y, x.shape[1], B=triton.next_power_of_2(x.shape[1]))
    return y
