"""The gradients of an RMS norm with a weight, by its input and by the weight."""

import torch
import torch.nn as nn

EPSILON = 1e-6


class Model(nn.Module):
    def forward(self, x, weight, upstream):
        """x, upstream: (rows, columns). weight: (columns,). Result: (like x, like weight)."""
        wide, scaled = x.float(), upstream.float() * weight.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        normed = wide * inverse
        by_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return by_x.to(x.dtype), (upstream.float() * normed).sum(0).to(weight.dtype)


def made(rows: int, columns: int):
    x, upstream = (torch.randn(rows, columns, dtype=torch.float16) for _ in range(2))
    return [x, (1 + 0.1 * torch.randn(columns)).to(torch.float16), upstream]


def get_inputs():
    return made(8192, 4096)


def get_init_inputs():
    return []


def get_workloads():
    return {"small": lambda: made(21, 100), "tall": lambda: made(300, 33)}


LAYOUTS = "contiguous"
