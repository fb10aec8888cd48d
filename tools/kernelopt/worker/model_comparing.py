"""What a run of a model, or of one of its modules, leaves, beside what the original leaves."""

from dataclasses import dataclass

import torch

from ..model_types import ModelCheck
from . import accuracy
from .contract import WrongModelFile
from .faults import describe, shortened
from .model_file import Tensors


@dataclass(frozen=True)
class Difference:
    """How far tensors are from the right ones. worst: the largest error; bound: the largest that is allowed. wrong: a
    sentence on the first tensor that is off; None where none is."""

    tensors: int
    worst: float
    bound: float
    wrong: str | None

    def check(self, name: str) -> ModelCheck:
        return ModelCheck(name, self.wrong is None, self.wrong or f"{self.tensors} tensors, {self.fine}")

    @property
    def fine(self) -> str:
        return f"off by {self.worst:.2g} at most, where {self.bound:.2g} is allowed"


def difference(
    actual: Tensors, plain: Tensors, exact: Tensors | None, tolerance: float, cap: float = float("inf")
) -> Difference:
    """plain: of the original; exact: of the original in a wider dtype, None where there is none. tolerance, cap: as for
    `deviation_of`."""
    if actual.keys() != plain.keys():
        return Difference(0, 0.0, 0.0, f"{len(actual)} tensors, where the original gives {len(plain)}")
    worst = bound = 0.0
    for name, right in plain.items():
        one, oracle = actual[name], (exact or {}).get(name, right)
        if (one.shape, one.dtype) != (right.shape, right.dtype):
            wanted = f"where it should be {right.dtype} {tuple(right.shape)}"
            return Difference(0, 0.0, 0.0, f"{name} is {one.dtype} {tuple(one.shape)}, {wanted}")
        if oracle.shape != right.shape:
            oracle = right
        found = deviation_of(one, oracle, right, tolerance if right.is_floating_point() else 0.0, cap)
        if count := found.mismatches + found.nonfinite:
            share = f"{100 * count / one.numel():.3g} % of {name} is off by more than {found.bound:.2g}"
            return Difference(0, found.max_rel, found.bound, f"{share}, and by {found.max_rel:.2g} at most")
        worst, bound = max(worst, found.max_rel), max(bound, found.bound)
    return Difference(len(plain), worst, bound, None)


def deviation_of(
    actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, tolerance: float, cap: float
) -> accuracy.Deviation:
    """How far a tensor is from the exact one. The tolerance is allowed, or twice the error of the plain one, up to
    `cap` tolerances; what is within that of the plain one is right too."""
    scale = accuracy.scale_of(exact)
    actual, exact, plain = (accuracy.comparable(one).reshape(-1) for one in (actual, exact, plain))
    if not exact.numel():
        return accuracy.Deviation(tolerance, scale)
    theirs = 2 * accuracy.deviation(plain, exact, tolerance, scale).max_rel
    allowed = max(tolerance, min(theirs, cap * tolerance) if tolerance else theirs)
    return accuracy.deviation(actual, exact, allowed, scale, plain)


def reason(error: BaseException) -> str:
    """The first line of what went wrong. What ModelFile tells as the model's fault is told by itself."""
    while isinstance(error, WrongModelFile) and error.__cause__:
        error = error.__cause__
    return first_line(describe(error)["message"])


def first_line(error: object) -> str:
    text = str(error).strip() or type(error).__name__
    return shortened(text.splitlines()[0])
