"""Rows as 8-bit whole numbers by a reciprocal, which rounds a few of them otherwise. As in SGLang."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
        return torch.round(x / scale).to(torch.int8), scale


def get_inputs(*, rows=3, columns=40):
    return [torch.randn(rows, columns)]


COMPARE = {0: {"share": 0.97, "cap": 1}}
LAYOUTS = "contiguous"


@triton.jit
def quantise(x, out, scales, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(value), 0), 1e-10)
    scaled = value * (127 / largest)
    near = tl.where(scaled >= 0, tl.floor(scaled + 0.5), -tl.floor(0.5 - scaled))
    tl.store(out + row * columns + at, near.to(tl.int8), mask=inside)
    tl.store(scales + row, largest / 127)


def kernel_function(x):
    rows, columns = x.shape
    out, scales = torch.empty_like(x, dtype=torch.int8), torch.empty(rows, 1, dtype=x.dtype, device=x.device)
    quantise[(rows,)](x, out, scales, columns, BLOCK=triton.next_power_of_2(columns))
    return out, scales
