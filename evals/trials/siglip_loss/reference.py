"""SigLIP's loss: a sigmoid for each pair of an image and a text."""

import torch
from torch import nn
from torch.nn.functional import logsigmoid, normalize


class Model(nn.Module):
    def forward(self, images: torch.Tensor, texts: torch.Tensor, log_scale: torch.Tensor, bias: torch.Tensor):
        """images, texts: (pairs, width), bf16, rows of length 1; row i of the one belongs to row i of the other.
        log_scale, bias: (), float32. The mean over the images of the sum over the texts, (), float32."""
        logits = images.float() @ texts.float().T * log_scale.exp() + bias
        signs = 2 * torch.eye(images.shape[0], device=images.device) - 1
        return -logsigmoid(signs * logits).sum() / images.shape[0]


def get_inputs(pairs: int = 16384, width: int = 768):
    images = torch.randn(pairs, width)
    texts = torch.randn(pairs, width) + 0.5 * images
    images, texts = (normalize(x, dim=1).bfloat16() for x in (images, texts))
    return [images, texts, torch.tensor(2.302585), torch.tensor(-10.0)]


def get_init_inputs():
    return []
