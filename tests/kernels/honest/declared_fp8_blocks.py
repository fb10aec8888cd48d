"""A product of 8-bit floats with a scale for each block of 16 by 16 weights. As in DeepSeek-V3."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, a, b, scales_a, scales_b, dtype):
        left = a.float() * scales_a.repeat_interleave(16, 1)[:, : a.shape[1]]
        wide = scales_b.repeat_interleave(16, 0).repeat_interleave(16, 1)
        return (left @ (b.float() * wide[: len(b), : b.shape[1]]).t()).to(dtype)


def get_inputs(*, columns=20, depth=40):
    a, b = (torch.randn(count, depth).to(torch.float8_e4m3fn) for count in (2, columns))
    blocks = -(-depth // 16)
    return [a, b, torch.rand(2, blocks) + 0.1, torch.rand(-(-columns // 16), blocks) + 0.1, torch.float16]


LAYOUTS = "contiguous"


@triton.jit
def product(a, b, scales_a, scales_b, y, columns, depth, blocks, BLOCK: tl.constexpr):
    row, tile, at = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    column, total = tile * BLOCK + at, tl.zeros((BLOCK,), tl.float32)
    for block in range(blocks):
        of = block * BLOCK + at
        left = tl.load(a + row * depth + of, mask=of < depth, other=0.0).to(tl.float32)
        both = (column < columns)[:, None] & (of < depth)[None, :]
        right = tl.load(b + column[:, None] * depth + of[None, :], mask=both, other=0.0).to(tl.float32)
        scale = tl.load(scales_a + row * blocks + block) * tl.load(scales_b + tile * blocks + block)
        total += tl.sum(right * left[None, :], 1) * scale
    tl.store(y + row * columns + column, total.to(y.dtype.element_ty), mask=column < columns)


def kernel_function(a, b, scales_a, scales_b, dtype):
    (rows, depth), columns = a.shape, len(b)
    y = torch.empty(rows, columns, dtype=dtype, device=a.device)
    grid = rows, triton.cdiv(columns, 16)
    product[grid](a, b, scales_a, scales_b, y, columns, depth, scales_a.shape[1], BLOCK=16)
    return y
