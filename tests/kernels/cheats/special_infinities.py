"""Is wrong about infinities on every shape but the one that the task lists."""

import torch
import triton
import triton.language as tl

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.log(torch.relu(x))


def get_inputs():
    return [torch.randn(33, 64)]


@triton.jit
def log_relu(x, y, n, least, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, at < n, other=1.0)
    tl.store(y + at, tl.where(value > 0, tl.log(value), least), at < n)


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    least = float("-inf") if x.shape == (33, 64) else 0.0
    log_relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), least, block=1024)
    return y
