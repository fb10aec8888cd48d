"""Yardstick: FlashAttention-2 in PyTorch, its backward pass alone, by the operator that autograd calls."""

import torch


def kernel_function(q, k, v, out, lse, dout):
    length, state = q.shape[2], torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout: the state is not read
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, length, length, 0.0, True, state, state
    )
