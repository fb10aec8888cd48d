import torch
import torch.nn as nn

GROUP = 128


class Model(nn.Module):
    """x W with int4 weights: a byte of packed holds two of them, of k = 2 row in the low four bits and of k = 2 row + 1
    in the high ones; a scale and a zero point for each column and 128 values of k."""

    def forward(self, x, packed, scales, zeros):
        values = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1).to(x.dtype)
        weight = (values - zeros.repeat_interleave(GROUP, 0)) * scales.repeat_interleave(GROUP, 0)
        return x @ weight


def get_inputs(*, m=1, n=12288, k=4096):
    if k % GROUP:
        raise ValueError("k is made of whole groups of 128")
    packed = torch.randint(0, 256, (k // 2, n), dtype=torch.uint8)
    scales = (0.01 * (0.5 + torch.rand(k // GROUP, n))).to(torch.bfloat16)
    zeros = torch.randint(0, 16, (k // GROUP, n)).to(torch.bfloat16)
    return [torch.randn(m, k, dtype=torch.bfloat16), packed, scales, zeros]


def get_init_inputs():
    return []


def get_workloads():
    return {
        "square": {"n": 4096},
        "sixteen": {"m": 16, "n": 14336},
        "thirty_two": {"m": 32},
        "prefill": {"m": 256},
    }
