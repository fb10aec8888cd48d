"""Cross-entropy whose gradient is written over the logits, as Liger's is; the logits are contiguous."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, logits, target):
        with torch.enable_grad():
            x = logits.clone().requires_grad_()
            loss = nn.functional.cross_entropy(x, target)
            (gradient,) = torch.autograd.grad(loss, x)
        logits.copy_(gradient)
        return loss.detach()


def get_inputs(*, tokens=16, vocabulary=300):
    if vocabulary < 2:
        raise ValueError("a vocabulary of one has no loss")
    target = torch.randint(0, vocabulary, (tokens,))
    target[1:2] = -100  # ignored
    return [torch.randn(tokens, vocabulary), target]


MUTATES = ("logits",)
LAYOUTS = "contiguous"
