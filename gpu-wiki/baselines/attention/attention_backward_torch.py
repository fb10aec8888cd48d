"""Gradients of causal attention, with its forward pass, by torch.

Arguments: q, k, v, dout (batch, heads, length, width)
"""

import torch
from torch.nn import functional

CAUSAL = True


def kernel_function(q, k, v, dout):
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = functional.scaled_dot_product_attention(*inputs, is_causal=CAUSAL)
        return torch.autograd.grad(out, inputs, dout)
