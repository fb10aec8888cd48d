"""Gradients of attention, causal or over a window, from what its forward pass saved, by torch's flash path alone.

Arguments: q, out, dout (batch, heads, length, width), k, v (batch, key heads, length, width), lse (batch, heads, length)
GPU: needed
Interface: torch.ops.aten._flash_attention_backward
"""

import torch

WINDOW = None  # keys that a query sees, itself included; None: all up to it


def kernel_function(q, k, v, out, lse, dout):
    q, k, v, out, dout = (tensor.transpose(1, 2) for tensor in (q, k, v, out, dout))
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # without dropout it is not read
    window = {} if WINDOW is None else {"window_size_left": WINDOW - 1, "window_size_right": 0}
    gradients = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, WINDOW is None, state, state, **window
    )
    return tuple(tensor.transpose(1, 2) for tensor in gradients)
