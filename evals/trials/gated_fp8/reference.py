"""Gate and up projection of a gated MLP in fp8 with block scales, SwiGLU, and the result quantised again for the next
fp8 product: h = silu(x @ gate^T) * (x @ up^T); for each 128 values of a row of h, scale = amax / 448 and q = h / scale.

x, gate and up are e4m3. scale_x holds a scale for each 128 values of a row of x, scale_gate and scale_up one for each
block of 128 x 128. Wanted is fp8 arithmetic: the operands go to the tensor cores as they are. h stays in fp32.
"""

import torch
from torch import nn
from torch.nn import functional

TOKENS, WIDTH, COLUMNS, BLOCK = 8192, 4096, 7168, 128


class Model(nn.Module):
    def forward(self, x, gate, up, scale_x, scale_gate, scale_up):
        wide = torch.promote_types(scale_x.dtype, torch.float32)
        rows = x.to(wide) * scale_x.to(wide).repeat_interleave(BLOCK, 1)[:, : x.shape[1]]

        def product(weight, scale):
            of_w = scale.to(wide).repeat_interleave(BLOCK, 0)[: len(weight)].repeat_interleave(BLOCK, 1)
            return rows @ (weight.to(wide) * of_w[:, : x.shape[1]]).t()

        h = functional.silu(product(gate, scale_gate)) * product(up, scale_up)
        blocks = h.unflatten(1, (-1, BLOCK))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
        return (blocks / scale).flatten(1).to(torch.float8_e4m3fn), scale.squeeze(-1).float()


def get_inputs(*, tokens=TOKENS, width=WIDTH, columns=COLUMNS):
    x = torch.randn(tokens, width).to(torch.float8_e4m3fn)
    gate, up = (torch.randn(columns, width).to(torch.float8_e4m3fn) for _ in range(2))
    deep, broad = -(-width // BLOCK), columns // BLOCK
    scale_x = torch.rand(tokens, deep) + 0.25
    return [x, gate, up, scale_x, *((torch.rand(broad, deep) + 0.25) / 64 for _ in range(2))]


def get_init_inputs():
    return []


# Sums of 128 products in the tensor cores, then fp32. q is rounded to 3 bits, and h may fall on the other side.
COMPARE = {0: {"rms": 0.03}, 1: {"rms": 0.002}}
