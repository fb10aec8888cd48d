"""The cross-entropy of each token, from hidden states and the output layer: 550 GFLOP, bound by computing."""

import math

import torch
import torch.nn as nn

IGNORED = -100


class Model(nn.Module):
    def forward(self, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits = hidden.to(wide) @ weight.to(wide).t()
        return nn.functional.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")


def get_inputs(*, tokens: int = 4096, width: int = 2048, vocabulary: int = 32768):
    if vocabulary < 2:
        raise ValueError("a vocabulary of one has no loss")
    hidden, weight = 2.5 * torch.randn(tokens, width), torch.randn(vocabulary, width) / math.sqrt(width)
    target = torch.randint(0, vocabulary, (tokens,))
    target[3::16] = IGNORED  # such as padding
    return [hidden.bfloat16(), weight.bfloat16(), target]  # logits of 2.5, so that the softmax is not flat


def get_init_inputs():
    return []
