import torch
import torch.nn as nn


class Model(nn.Module):
    """x w^T of e4m3 operands with one scale a tensor (or a scale for each row of w), bf16 result. Wanted is fp8
    arithmetic: the operands go to the tensor cores as they are."""

    def forward(self, x, weight, scale_x, scale_w):
        return ((x.float() @ weight.float().t()) * (scale_x * scale_w)).to(torch.bfloat16)


def get_inputs(*, m=4096, n=4096, k=4096):
    x = torch.randn(m, k).to(torch.float8_e4m3fn)
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    return [x, weight, torch.tensor(0.5), torch.tensor(0.02)]


def get_init_inputs():
    return []


def get_workloads():
    return {
        "unaligned": {"k": 4127},
        "skinny": {"m": 32, "n": 8192, "k": 8192},
        "wide": {"n": 14336},
    }


# The sums in the tensor cores keep about 14 bits (gpu-wiki/docs/optimization/fp8.md).
COMPARE = {0: {"rms": 0.01}}
