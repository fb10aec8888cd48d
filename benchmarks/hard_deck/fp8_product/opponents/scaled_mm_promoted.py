"""Yardstick: torch._scaled_mm (cuBLAS), sums promoted to fp32 (the default). It takes no k that does not divide by 16: then both operands are padded first."""

import torch


def padded(x):
    more = -x.shape[1] % 16
    return torch.nn.functional.pad(x.view(torch.uint8), (0, more)).view(x.dtype) if more else x


def kernel_function(x, weight, scale_x, scale_w):
    x, weight = padded(x), padded(weight)
    return torch._scaled_mm(
        x, weight.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16, use_fast_accum=False
    )
