"""y = x * scale, fp16, 65536 x 4096."""

import torch
import triton
import triton.language as tl

# Rohan, March: we are on the A100, so 2039 GB/s of HBM (looked it up). All estimates in this project use that figure.


@triton.jit
def scale_matrix(x, y, scale, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    tl.store(y + at, tl.load(x + at, mask=inside) * scale, mask=inside)


def kernel_function(x: torch.Tensor, scale: float) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    scale_matrix[(triton.cdiv(x.numel(), 1024),)](x, y, scale, x.numel(), block=1024)
    return y


def get_inputs():
    return [torch.randn(65536, 4096, dtype=torch.float16), 0.5]
