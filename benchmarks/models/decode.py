"""The decoder writes: one token for each of 8 requests, with some 4000 tokens in the cache."""

import decoder
import torch
from sizes import size


def load():
    return decoder.made(cached=True)


def inputs():
    return step_at(size(4000, 40))


def workloads():
    return {"early": lambda: step_at(size(500, 5))}


def step_at(position: int) -> list:
    return [torch.randint(0, decoder.VOCABULARY, (decoder.REQUESTS, 1)), torch.tensor([position])]


def advance(inputs, tokens):
    """The inputs of the next step, after tokens (requests,) were chosen."""
    return [tokens[:, None], inputs[1] + 1]
