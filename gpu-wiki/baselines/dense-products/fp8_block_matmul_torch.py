"""x w^T of e4m3 operands with scales for 1 x 128 and 128 x 128, bf16 result, by torch (cuBLAS 12.9, 9.0). The transposition of the scales of x counts.

Arguments: x (M, K) e4m3, weight (N, K) e4m3, scale_x (M, K / 128), scale_w (N / 128, K / 128); K a multiple of 512
GPU: needed
Interface: torch._scaled_mm; docs/optimization/fp8.md
"""

import torch


def kernel_function(x, weight, scale_x, scale_w):
    along_m = scale_x.t().contiguous().t()
    return torch._scaled_mm(x, weight.t(), scale_a=along_m, scale_b=scale_w.t(), out_dtype=torch.bfloat16)
