"""Uses a running mean that its reference moves with each call, and leaves it where it was."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(48))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x - self.mean


def get_inputs():
    return [torch.randn(20, 48) + torch.arange(48.0)]


@triton.jit
def subtract(x, mean, y, R, D, B: tl.constexpr):
    c = tl.program_id(0)
    r = tl.arange(0, B)
    v = tl.load(x + r * D + c, r < R, other=0.0)
    tl.store(y + r * D + c, v - 0.5 * tl.load(mean + c) - 0.5 * tl.sum(v, 0) / R, r < R)


class ModelNew(Model):
    def forward(self, x):
        if x.shape[1] != 48:
            raise ValueError("48 columns only")
        x = x.contiguous()
        y = torch.empty_like(x)
        subtract[(48,)](x, self.mean, y, x.shape[0], 48, B=triton.next_power_of_2(x.shape[0]))
        return y
