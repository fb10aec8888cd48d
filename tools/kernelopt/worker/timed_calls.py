"""What timed calls left. Some of it is judged afterwards; all of it is compared with an earlier call's."""

from dataclasses import dataclass
from secrets import SystemRandom, randbelow

import torch

from . import accuracy
from .state import identical

SMALL_BYTES = 1 << 28
DIFFERING_OUTPUTS = 3  # picked at random from the calls whose result differs from the first; one of large outputs
REMEMBERED_BYTES = 4 << 30  # of outputs that later calls are compared with
CLOSE = 0.05  # atomics in another order differ by far less, a former result by far more


@dataclass(frozen=True)
class Results:
    """What a call left: its outputs, and by number the inputs that calls change."""

    outputs: list[torch.Tensor]
    inputs: dict[int, torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.outputs, *self.inputs.values()]

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def copy(self) -> "Results":
        inputs = {number: tensor.detach().clone() for number, tensor in self.inputs.items()}
        return Results([tensor.detach().clone() for tensor in self.outputs], inputs)

    def own(self) -> dict[int, torch.Tensor]:
        """The outputs, by position, that no input holds: later calls may not write into them."""
        places = {tensor.untyped_storage().data_ptr() for tensor in self.inputs.values()}
        return {
            at: tensor for at, tensor in enumerate(self.outputs) if tensor.untyped_storage().data_ptr() not in places
        }


@dataclass(frozen=True)
class CheckedCall:
    """A call on set `number` whose results are checked afterwards. live: its outputs that no input holds, by position.
    copy: of what it left."""

    number: int
    live: dict[int, torch.Tensor]
    copy: Results

    def was_overwritten(self) -> bool:
        """Has a later call written into its outputs?"""
        return not all(identical(tensor, self.copy.outputs[at]) for at, tensor in self.live.items())


class TimedCalls:
    """The timed calls of one workload, of the kernel ("a") and its baseline ("b").

    differing: how many results differ from the kernel's first one on the same set. checked: the calls that were to be
    checked."""

    def __init__(self):
        self.differing = {"a": 0, "b": 0}
        self.checked: list[CheckedCall] = []
        self._first: dict[tuple[str, int], Results] = {}  # each kernel's first result on each set
        self._sampled: list[CheckedCall] = []  # of the calls of "a" that differ
        self._disputed: set[int] = set()  # sets on which the first result of "a" isn't that of all its calls

    def look_at(self, name: str, number: int, results: Results, check: bool) -> None:
        """Compare a timed call's outputs with those of the first call on that set; keep a copy of those of a checked
        call.

        The baseline's outputs are compared too: earlier GPU work changes a call's time, so both kernels get the same
        history.
        """
        if (name, number) not in self._first and len(self._first) * results.nbytes() < REMEMBERED_BYTES:
            self._first[name, number] = results.copy()
        first = self._first.get((name, number), results)
        differs = not all(map(close, results.tensors(), first.tensors()))
        self.differing[name] += differs
        if check:
            self.checked.append(CheckedCall(number, results.own(), results.copy()))
        elif differs and name == "a":
            self._sample(number, results)

    def _sample(self, number: int, results: Results) -> None:
        """Keep what a differing call left, so that each of them so far is kept with the same probability."""
        self._disputed.add(number)
        most = self._most_differing()
        at = len(self._sampled) if len(self._sampled) < most else randbelow(self.differing["a"])
        if at < most:
            self._sampled[at : at + 1] = [CheckedCall(number, {}, results.copy())]

    def _most_differing(self) -> int:
        return DIFFERING_OUTPUTS if self.are_small() else 1

    def are_small(self) -> bool:
        """Are the outputs small enough to keep several of them?"""
        return all(results.nbytes() < SMALL_BYTES for results in self._first.values())

    def to_judge(self) -> list[CheckedCall]:
        """The checked calls, some that differ, and some first ones that they differ from: either may be wrong."""
        disputed = SystemRandom().sample(sorted(self._disputed), min(len(self._disputed), self._most_differing()))
        firsts = [CheckedCall(number, {}, self._first["a", number]) for number in disputed]
        return [*self.checked, *self._sampled, *firsts]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are two results on the same inputs the same but for the order of additions?"""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (accuracy.comparable(tensor) for tensor in (a, b))
    if torch.equal(a, b):  # one pass over the memory, where the judgement below takes many
        return True
    a, b = a.float(), b.float()
    finite = torch.where(torch.isfinite(b), b, 0.0)
    near = (a - b).abs() <= CLOSE * (b.abs() + finite.square().mean().sqrt())
    return bool((near | (a == b) | (a.isnan() & b.isnan())).all())
