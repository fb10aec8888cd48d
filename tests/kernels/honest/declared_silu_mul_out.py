"""The output is an argument, as FlashInfer passes it: silu of one half of each row times the other."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, out, x):
        gate, up = x.chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)


def get_inputs(*, rows=3, columns=20):
    return [torch.empty(rows, columns), torch.randn(rows, 2 * columns)]


MUTATES = ("out",)
LAYOUTS = "contiguous"


@triton.jit
def silu_mul(out, x, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(x + row * 2 * columns + at, mask=inside, other=0.0)
    up = tl.load(x + (row * 2 + 1) * columns + at, mask=inside, other=0.0)
    tl.store(out + row * columns + at, gate * tl.sigmoid(gate) * up, mask=inside)


def kernel_function(out, x):
    rows, columns = out.shape
    silu_mul[(rows, triton.cdiv(columns, 16))](out, x, columns, BLOCK=16)
