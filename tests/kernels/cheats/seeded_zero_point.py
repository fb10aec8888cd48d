"""Ignores a buffer of zero points that are all 0."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "variants"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("zeros", torch.zeros(64, dtype=torch.int8))
        self.register_buffer("scales", torch.rand(64))

    def forward(self, codes):
        return (codes - self.zeros) * self.scales


def get_inputs():
    return [torch.randint(-64, 64, (40, 64), dtype=torch.int8)]


@triton.jit
def widen(codes, scales, y, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    tl.store(y + r * B + o, tl.load(codes + r * B + o).to(tl.float32) * tl.load(scales + o))


class ModelNew(Model):
    def forward(self, codes):
        codes = codes.contiguous()
        y = torch.empty(codes.shape, device=codes.device)
        widen[(len(codes),)](codes, self.scales, y, B=64)
        return y
