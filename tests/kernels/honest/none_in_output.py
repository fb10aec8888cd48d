"""Returns a tuple with a place for what was not asked for."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x, cache=None):
        return torch.relu(x), cache


def get_inputs():
    return [torch.randn(50, 70)]


@triton.jit
def relu(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.maximum(tl.load(x + at, at < n), 0.0), at < n)


def kernel_function(x, cache=None):
    x = x.contiguous()
    y = torch.empty_like(x)
    relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y, cache
