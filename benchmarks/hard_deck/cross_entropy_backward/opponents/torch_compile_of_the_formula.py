"""Yardstick: the gradient written out as a formula, behind torch.compile, which fuses it into the pass that writes."""

import torch


@torch.compile
def loss_and_gradient(logits, target):
    exact = logits.float()
    counted = target != -100
    share = 1.0 / counted.sum()
    shift = torch.logsumexp(exact, -1, keepdim=True)
    column = torch.arange(logits.shape[1], device=logits.device)
    at_target = column[None, :] == target[:, None]
    gradient = (torch.exp(exact - shift) - at_target.float()) * share
    losses = shift[:, 0] - exact.gather(1, target.clamp(min=0)[:, None])[:, 0]
    logits.copy_(torch.where(counted[:, None], gradient, 0.0))
    return torch.where(counted, losses, 0.0).sum() * share


def kernel_function(logits, target):
    return loss_and_gradient(logits, target)
