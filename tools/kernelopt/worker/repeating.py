"""The same call again and again, and all of its bits compared: a race may show in one call of hundreds, by an error
that the tolerance allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic  # now, since a kernel may replace it

import torch

from . import accuracy
from .state import all_identical

LIMIT_S = {"cuda": 0.1, "cpu": 0.01}  # of a workload's calls
MOST = 1000  # calls
INFINITY = float("inf")
PIECE = 1 << 24  # elements that are subtracted at once
UNWRITTEN = 0xFF  # NaN in every floating format


@dataclass
class Repeats:
    """The calls that were made, and how many of them left another result than the first. worst: what the one left that
    is farthest from it; distance: how far."""

    calls: int = 0
    differing: int = 0
    worst: list[torch.Tensor] = field(default_factory=list)
    distance: float = -1.0

    def note(self, left: list[torch.Tensor], distance: float) -> None:
        """What a call left that differs, at this distance."""
        if distance > self.distance:
            self.distance, self.worst = distance, [tensor.detach().clone() for tensor in left]


def repeated(
    call: Callable[[], Sequence[torch.Tensor]], first: list[torch.Tensor], limit_s: float, kept: set[int]
) -> Repeats:
    """Make the call until the time is over. call: gives the tensors that it left; first: those that the first one left.
    They are overwritten before the next call, which could else leave an old result in place; kept: the addresses of
    storages that are not. Distances take as long again at most: where all calls differ, some tell enough."""
    end, measuring_s, found = monotonic() + limit_s, 0.0, Repeats()
    while monotonic() < end + measuring_s and found.calls < MOST:
        left = list(call())
        found.calls += 1
        if not all_identical(left, first):
            found.differing += 1
            if measuring_s < limit_s:
                began = monotonic()
                found.note(left, distance_of(left, first))
                measuring_s += monotonic() - began
        for storage in (tensor.untyped_storage() for tensor in left):
            if storage.data_ptr() not in kept:
                storage.fill_(UNWRITTEN)
    return found


def distance_of(left: list[torch.Tensor], first: list[torch.Tensor]) -> float:
    """The largest difference of two elements, in units of the tensor's largest one. Infinite where tensors have other
    shapes, or one is NaN where the other is not."""
    if [(one.shape, one.dtype) for one in left] != [(one.shape, one.dtype) for one in first]:
        return INFINITY
    return max((of_tensors(*pair) for pair in zip(left, first, strict=True) if pair[0].numel()), default=0.0)


def of_tensors(left: torch.Tensor, first: torch.Tensor) -> float:
    """`distance_of` a pair of one shape and dtype."""
    farthest = size = 0.0
    for one, other in zip(accuracy.flat(left).split(PIECE), accuracy.flat(first).split(PIECE), strict=True):
        apart = (one.double() - other.double()).abs().masked_fill_(accuracy.same(one, other), 0.0)
        farthest = max(farthest, apart.nan_to_num(nan=INFINITY, posinf=INFINITY).max().item())
        size = max(size, other.double().abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max().item())
    return farthest / (size or 1.0)
