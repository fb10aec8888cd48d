"""Liger's cross-entropy on a copy that lies as the logits do, so that they stay."""

import torch
from liger_kernel.transformers.functional import liger_cross_entropy


def kernel_function(logits, target):
    with torch.enable_grad():
        x = logits.clone().requires_grad_()
        loss = liger_cross_entropy(x, target)
        (gradient,) = torch.autograd.grad(loss, x)
    return loss.detach(), gradient
