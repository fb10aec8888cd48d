"""Cross-entropy and its gradient, which is returned; the logits may lie in any way."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, logits, target):
        with torch.enable_grad():
            x = logits.detach().requires_grad_()
            loss = nn.functional.cross_entropy(x, target)
            (gradient,) = torch.autograd.grad(loss, x)
        return loss.detach(), gradient


def get_inputs(*, tokens=16, vocabulary=300):
    if vocabulary < 2:
        raise ValueError("a vocabulary of one has no loss")
    return [torch.randn(tokens, vocabulary), torch.randint(0, vocabulary, (tokens,))]
