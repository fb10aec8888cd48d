"""x w^T with int4 weights in torch's own packing (torch.ops.aten._convert_weight_to_int4pack), groups of 128, bf16.

Arguments: x (M, K), packed, scales_and_zeros (K / 128, N, 2)
GPU: needed
Interface: torch.ops.aten._weight_int4pack_mm
"""

import torch

GROUP = 128


def kernel_function(x, packed, scales_and_zeros):
    return torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales_and_zeros)
