"""Ends a call on the CPU that takes too long for a trial. Imported by worker processes only."""

import sys
from collections.abc import Callable

import torch

from .watching import Watching

TRIAL_ELEMENTS = 1 << 25  # made by torch's operations: some 0.1 s on a core


def limited(call: Callable):
    """The result of the call, or TooMuchWork. What fails inside the limit is called again without it, and what torch
    compiles is called without it at once: a trace that fails because it is watched is kept, and fails later too."""
    if "torch._dynamo" in sys.modules:
        return call()
    try:
        with WorkLimit(TRIAL_ELEMENTS):
            return call()
    except TooMuchWork:
        raise
    except Exception:
        if compiler := sys.modules.get("torch._dynamo"):
            compiler.reset()
        return call()


class TooMuchWork(Exception):
    """The operations inside a `WorkLimit` made more elements than it allows."""


class WorkLimit(Watching):
    """Inside, the operation of torch after which more than `elements` have been made in all raises TooMuchWork. Small
    inputs may be much work: the scores of 16,384 queries of width 1 take a second."""

    def __init__(self, elements: int):
        super().__init__()
        self._left = elements

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else [result]
        if not function.is_view:
            self._left -= sum(one.numel() for one in made if isinstance(one, torch.Tensor))
        if self._left < 0:
            raise TooMuchWork
        return result
