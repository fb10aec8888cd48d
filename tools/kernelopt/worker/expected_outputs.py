"""One output that the reference expects: how far another one may be from it, and the comparison of the two."""

import functools
from dataclasses import dataclass, replace

import torch

from ..case_types import OutputCheck, Variant
from . import accuracy, comparisons, sampling, state, tensor_trees, variant_inputs
from .comparisons import Comparison
from .sampling import Sampling

# Bound on variant_inputs.VALUES, which the task does not have: a right kernel may be far less exact than PyTorch there.
ROUGHLY = 0.25


@dataclass(frozen=True)
class ChangedInput:
    """A tensor of the inputs whose contents after the call are an output. number: among the tensors. name: of the
    parameter that holds it. before: its contents before the call."""

    number: int
    name: str
    before: torch.Tensor


@dataclass(frozen=True)
class ExpectedOutput:
    """An output of the reference, in the task's own dtype (baseline) and in the highest precision (oracle), and how
    another is compared with it.

    bound, least_rms: see accuracy.Bounds. roughly: see comparisons.compare. inputs: of the call, before it.
    declared: what COMPARE says of it. sampled: how a kernel draws it, by the probabilities that the oracle then holds.
    changed: the input that it is the contents of; None for what forward returns."""

    baseline: torch.Tensor
    oracle: torch.Tensor
    bound: float
    inputs: list
    least_rms: float = 0.0
    roughly: float = 0.0
    declared: Comparison | None = None
    sampled: Sampling | None = None
    changed: ChangedInput | None = None

    def compare(self, actual: torch.Tensor) -> OutputCheck:
        """A kernel's output beside this one, as the task declares it; of a changed input also what must have stayed."""
        if self.sampled:
            return sampling.compare(actual, self.oracle)
        compared = comparisons.compare(actual, self._bounds, self.declared, self.inputs, self.roughly)
        if self.changed is None or compared.errors is None:
            return compared
        before = self.changed.before
        touched = 0  # another index of a tie may stand where the reference's happened to stand before
        if not (self.declared and self.declared.ties):
            touched = disturbed(actual, before, self.oracle, self.baseline, self._counts(before))
        unchanged = state.identical(actual, before)
        return replace(compared, input=self.changed.name, unchanged=unchanged, disturbed=touched)

    @functools.cached_property
    def _bounds(self) -> accuracy.Bounds:
        return accuracy.Bounds(self.oracle, self.baseline, self.bound, self.least_rms)

    def accepts(self, actual: torch.Tensor | None) -> bool:
        """Would it pass as a kernel's output?"""
        if actual is None:
            return False
        compared = self.compare(actual)
        return compared.errors is not None and not compared.errors.any and not compared.disturbed

    def is_repeated_by(self, again: torch.Tensor) -> bool:
        """Does a second result of the reference, in the task's own dtype, agree with the first one?"""
        bounds = accuracy.Bounds(self.baseline, self.baseline, self.bound)
        errors = comparisons.compare(again, bounds, self.declared, self.inputs).errors
        return errors is not None and not errors.any

    def is_unseen(self) -> bool:
        """Is no element of it compared?"""
        counts = self._counts(self.baseline)
        return counts is not None and bool(counts.numel()) and not counts.any()

    def stays(self) -> bool:
        """Does the reference leave the input, which it is declared to change, as it was?"""
        return state.identical(self.changed.before, self.baseline)

    def _counts(self, output: torch.Tensor) -> torch.Tensor | None:
        """Which elements of an output of this shape are compared; None for all of them."""
        return comparisons.mask_of(self.declared, self.inputs, output) if self.declared else None


def roughly_on(variant: Variant | None) -> float:
    """ExpectedOutput.roughly on a variant."""
    return ROUGHLY if variant and variant.values in variant_inputs.VALUES else 0.0


def bound_of(dtype: torch.dtype, coarser: str | None, tolerances: dict[str, float], roughly: float) -> float:
    """ExpectedOutput.bound: the tolerance of an output's dtype or, of a floating one, of a coarser dtype that it was
    computed in; no less than `roughly`, where not every element must be equal."""
    own = tolerances[tensor_trees.dtype_class(dtype)]
    bound = max(own, tolerances[coarser]) if own and coarser else own
    return max(roughly, bound) if bound else bound


def disturbed(
    actual: torch.Tensor,
    before: torch.Tensor,
    oracle: torch.Tensor,
    baseline: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> int:
    """How many elements of a changed input differ from before the call, although the reference leaves them as they
    were. Those are compared exactly: a kernel has no reason to touch them. counts: where the task compares it."""
    got, old, exact, theirs = (accuracy.comparable(tensor) for tensor in (actual, before, oracle, baseline))
    same = accuracy.same
    touched = same(exact, old.to(exact.dtype)) & same(theirs, old) & ~same(got, old)
    if counts is not None:
        touched &= counts.view(*counts.shape, *[1] * (touched.dim() - counts.dim()))  # complex numbers are pairs
    return int(touched.sum())
