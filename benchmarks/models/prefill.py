"""The decoder reads a prompt: 2048 tokens at once."""

import decoder
import torch
from sizes import size


def load():
    return decoder.made(cached=False)


def inputs():
    return [torch.randint(0, decoder.VOCABULARY, (1, size(2048, 24)))]


def workloads():
    return {"short": lambda: [torch.randint(0, decoder.VOCABULARY, (2, size(300, 7)))]}
