"""Yardstick: operands multiplied by their scales into bf16, then the library's product, by torch.compile. No fp8 arithmetic."""

import torch


@torch.compile
def kernel_function(x, weight, scale_x, scale_w):
    of_x = scale_x.repeat_interleave(128, 1)[:, : x.shape[1]]
    of_w = scale_w.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : x.shape[1]]
    return (x.float() * of_x).bfloat16() @ (weight.float() * of_w).bfloat16().t()
