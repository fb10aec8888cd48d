"""A linear layer of e4m3 numbers and its GELU: a scale for each token and each output channel, bias, bf16 result. Wanted
is fp8 arithmetic: the operands go to the tensor cores as they are.
"""

import torch
from torch import nn
from torch.nn.functional import gelu


class Model(nn.Module):
    def forward(self, x, weight, scale_x, scale_w, bias):
        """x (tokens, width), weight (channels, width), e4m3; scale_x (tokens, 1), scale_w (channels), float32; bias
        (channels), bf16. gelu(x weight^T scale_x scale_w + bias), (tokens, channels), bf16."""
        y = x.float() @ weight.float().T * scale_x * scale_w + bias.float()
        return gelu(y, approximate="tanh").to(bias.dtype)


def get_inputs(*, tokens: int = 8192, width: int = 4096, channels: int = 16384):
    x = torch.randn(tokens, width).to(torch.float8_e4m3fn)
    weight = torch.randn(channels, width).to(torch.float8_e4m3fn)
    scale_x, scale_w = 0.5 + torch.rand(tokens, 1), (0.5 + torch.rand(channels)) / width**0.5
    return [x, weight, scale_x, scale_w, torch.randn(channels, dtype=torch.bfloat16)]


def get_init_inputs():
    return []


# The sums in the tensor cores keep about 14 bits.
COMPARE = {0: {"rms": 0.01}}
