"""Returns the right tensors under other names."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_SHAPE"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return {"double": x * 2, "half": x / 2}


def get_inputs():
    return [torch.randn(33, 64)]


@triton.jit
def scale(x, y, factor, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.load(x + at, at < n) * factor, at < n)


def kernel_function(x):
    x = x.contiguous()
    y = {"a": torch.empty_like(x), "b": torch.empty_like(x)}
    for name, factor in (("a", 2.0), ("b", 0.5)):
        scale[(triton.cdiv(x.numel(), 1024),)](x, y[name], factor, x.numel(), block=1024)
    return y
