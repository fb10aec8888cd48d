"""How far outputs are from the oracle's. Pure functions."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..case_types import OutputCheck, OutputErrors, OutputLayout
from . import tensor_trees

BASELINE_CAP = 4  # however inexact PyTorch is, the bound is at most this number of tolerances
LARGEST_ERROR = 1e9  # where the scale is 0; JSON has no infinity
LOST = 0.5  # an element is lost when its error exceeds this share of it, whatever the scale of the others
TINY = 2.0**-126  # the smallest normal fp32; GPUs may flush smaller numbers to zero
CHUNK = 1 << 26  # elements that are worked on at once
FEW = 32  # no share is reported for fewer elements
ROW = 16  # elements along the last dimension, at least, that have a scale of their own
AS_NORMAL = math.sqrt(math.pi / 2)  # rms over mean |x| of normal numbers


def compare(
    actual: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor, tolerance: float, least_rms: float = 0.0
) -> OutputCheck:
    """`actual` beside `oracle` (the reference in high precision) and `baseline` (the reference in the task's own dtype,
    whose shape, dtype and stride are the ones expected). See `Bounds`."""
    return Bounds(oracle, baseline, tolerance, least_rms).check(actual)


def layout_of(tensor: torch.Tensor) -> OutputLayout:
    return OutputLayout(list(tensor.shape), str(tensor.dtype), significant_stride(tensor))


class Bounds:
    """How far an output may be from the oracle's; what does not depend on the output is computed once.

    An element is wrong when |actual - oracle| > bound * (|oracle| + scale), so that zeros fail whatever the scale of
    the result is. scale: see `Scale`. bound: the tolerance, or twice the baseline's own worst error where PyTorch is
    less exact than that (at most BASELINE_CAP tolerances). An element that agrees with the baseline within the
    tolerance is right too: rounding decides an argmax, and fp16 overflows.
    """

    def __init__(
        self,
        oracle: torch.Tensor,
        baseline: torch.Tensor,
        tolerance: float,
        least_rms: float = 0.0,
        scale: "Scale | None" = None,
    ):
        """least_rms: see `scale_of`. scale: None for the oracle's own."""
        self.oracle, self.baseline, self.tolerance, self.least_rms = oracle, baseline, tolerance, least_rms
        self.scale = scale or scale_of(oracle, least_rms)
        self._tiny = max(TINY, tolerance * least_rms)
        exact = flat(oracle)
        self._elements, self._finite = exact.numel(), sum(int(torch.isfinite(part).sum()) for part in pieces(exact))
        self._theirs = deviation(flat(baseline), exact, tolerance, self.scale, tiny=self._tiny)
        self._bound = max(tolerance, min(2 * self._theirs.max_rel, BASELINE_CAP * tolerance))

    def check(self, actual: torch.Tensor) -> OutputCheck:
        """An output beside these; without errors where its shape or dtype is another."""
        dense = self.baseline.clone()  # a slice of something larger counts as dense
        alike = actual.shape == self.oracle.shape and actual.dtype == self.baseline.dtype
        return OutputCheck(layout_of(actual), layout_of(dense), self.errors_of(actual) if alike else None)

    def errors_of(self, actual: torch.Tensor) -> OutputErrors:
        """The errors of an output of the oracle's shape and the baseline's dtype."""
        parts = flat(actual), flat(self.oracle)
        own = deviation(*parts, self._bound, self.scale, flat(self.baseline), self._tiny)
        return OutputErrors(
            elements=self._elements,
            finite=self._finite,
            rms=self.scale.rms,
            bound=self._bound,
            max_rel=own.max_rel,
            mismatches=own.mismatches,
            nonfinite=own.nonfinite,
            spurious=own.spurious,
            infinite=own.infinite,
            first_bad_index=own.first_bad,
            baseline_max_rel=self._theirs.max_rel,
            lost_pct=own.lost_pct(),
            baseline_lost_pct=self._theirs.lost_pct(),
        )


@dataclass(frozen=True)
class Scale:
    """What an error is compared with, beside the element itself: the rms of the output, or the size of the element's
    row where that is larger. In causal attention the first rows are averages of few values, so they and their roundings
    are larger than the others. rows: the larger one of both for each row of so many elements; None without rows."""

    rms: float
    rows: torch.Tensor | None = None
    row: int = 1

    def of(self, start: int, stop: int) -> float | torch.Tensor:
        """Of flat elements."""
        if self.rows is None:
            return self.rms
        each = self.rows[start // self.row : -(-stop // self.row)].repeat_interleave(self.row)
        return each[start % self.row :][: stop - start]


def scale_at(oracle: torch.Tensor, mask: torch.Tensor, least_rms: float = 0.0) -> Scale:
    """Of the elements of an output that a mask chooses, flat."""
    rms, values = max(root_mean_square(comparable(oracle[mask])), least_rms), comparable(oracle)
    # The parts of complex numbers are a dimension that their mask lacks.
    if not rms or not has_rows(values) or values.shape != mask.shape:
        return Scale(rms)
    in_each_row = mask.reshape(-1, values.shape[-1]).sum(1)
    return Scale(rms, row_sizes(values, rms, mask).repeat_interleave(in_each_row))


def scale_of(oracle: torch.Tensor, least_rms: float = 0.0) -> Scale:
    """least_rms: replaces a smaller rms of the output, because a single sum near 0, or a result that is 0 but for
    rounding, is no scale."""
    values = comparable(oracle)
    rms = max(root_mean_square(values), least_rms)
    return Scale(rms, row_sizes(values, rms), values.shape[-1]) if has_rows(values) and rms else Scale(rms)


def has_rows(values: torch.Tensor) -> bool:
    return values.dim() > 1 and ROW <= values.shape[-1] <= CHUNK and values.numel() > values.shape[-1]


def row_sizes(values: torch.Tensor, least: float, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The size of each row along the last dimension, at least `least` (above 0): its rms, or AS_NORMAL times its mean
    |element| where that is less. Both are equal for normal numbers; an outlier moves an rms more, and would hide more
    of its row. mask: of the elements that count."""
    sizes, row = [], values.shape[-1]
    masks = [None] if mask is None else mask.reshape(-1, row).split(CHUNK // row)
    for part, counts in zip(values.reshape(-1, row).split(CHUNK // row), itertools.cycle(masks), strict=False):
        size, total = zeroed(part).abs() / least, row
        if counts is not None:
            size, total = torch.where(counts, size, 0), counts.sum(1).clamp(min=1)
        sizes.append(torch.minimum(AS_NORMAL * size.sum(1) / total, (size.square().sum(1) / total).sqrt()))
    return least * torch.cat(sizes).clamp(min=1.0)


def root_mean_square(values: torch.Tensor) -> float:
    """The rms of a tensor, whose infinities and NaN count as 0; 0 for an empty one. It divides by the largest element
    first, because squares may overflow."""
    largest = max((float(zeroed(part).abs().max()) for part in pieces(values)), default=0.0)
    if not largest:
        return 0.0
    squares = sum(float((zeroed(part) / largest).square().sum()) for part in pieces(values))
    return largest * math.sqrt(squares / values.numel())


def zeroed(values: torch.Tensor) -> torch.Tensor:
    """In float64, infinities and NaN as 0."""
    return torch.where(torch.isfinite(values), values, 0).double()


def pieces(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in chunks, so that float64 copies of large outputs fit in memory."""
    return (part for part in values.reshape(-1).split(CHUNK) if part.numel())


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal, or both NaN."""
    return (a == b) | ((a != a) & (b != b))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its comparable values in one dimension."""
    return comparable(tensor).reshape(-1)


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that can be compared: complex as pairs, eight-bit floats in fp32."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor_trees.dtype_class(tensor.dtype) == "fp8" else tensor


def deviation(
    actual: torch.Tensor,
    exact: torch.Tensor,
    bound: float,
    scale: Scale,
    also: torch.Tensor | None = None,
    tiny: float = TINY,
) -> "Deviation":
    """Error statistics of flat tensors against `exact`; an element within the bound of `also` has no error, and one
    below `tiny` cannot be lost."""
    statistics = Deviation(bound, scale, tiny)
    whole = not any(t.dtype == torch.bool or t.is_floating_point() for t in (actual, exact, also) if t is not None)
    for start in range(0, exact.numel(), CHUNK):
        parts = [None if t is None else t[start : start + CHUNK] for t in (actual, exact, also)]
        if whole:  # float64 does not hold every int64, but their differences that matter
            parts = [None if t is None else t.long() - parts[1].long() for t in parts]
        statistics.add(*(None if t is None else t.double() for t in parts), start)
    return statistics


class Deviation:
    """Running error statistics of one tensor against the oracle."""

    def __init__(self, bound: float, scale: Scale, tiny: float = TINY):
        self.bound, self.scale, self.tiny = bound, scale, tiny
        self.max_rel = 0.0
        self.mismatches = self.nonfinite = self.spurious = self.infinite = self.lost = self.weighed = 0
        self.first_bad: int | None = None

    def add(self, actual: torch.Tensor, exact: torch.Tensor, also: torch.Tensor | None, offset: int) -> None:
        scale = self.scale.of(offset, offset + exact.numel())
        error, nonfinite_mismatch = self._errors(actual, exact, scale)
        if also is not None:
            other, other_nonfinite = self._errors(actual, also, scale)
            agrees = (other <= self.bound) & ~other_nonfinite
            error = torch.where(agrees, torch.minimum(error, other), error)
            nonfinite_mismatch &= ~agrees
        wrong = (error > self.bound) | nonfinite_mismatch
        self.max_rel = max(self.max_rel, float(error.max()))
        weighed = torch.isfinite(exact) & (exact.abs() >= self.tiny)
        self.weighed += int(weighed.sum())
        self.lost += int((weighed & ((actual - exact).abs() > LOST * exact.abs())).sum())
        self.mismatches += int((wrong & ~nonfinite_mismatch).sum())
        self.nonfinite += int(nonfinite_mismatch.sum())
        self.spurious += int((nonfinite_mismatch & torch.isfinite(exact)).sum())
        self.infinite += int((nonfinite_mismatch & torch.isinf(exact)).sum())
        if self.first_bad is None and bool(wrong.any()):
            self.first_bad = offset + int(wrong.nonzero()[0])

    def lost_pct(self) -> float:
        """Share of the elements that are not 0 (nor subnormal) whose error exceeds half of themselves."""
        return 100 * self.lost / self.weighed if self.weighed >= FEW else 0.0

    @staticmethod
    def _errors(
        actual: torch.Tensor, expected: torch.Tensor, scale: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(|error| / (|expected| + scale), where only one of the two is finite or they are different infinities)"""
        same = (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))
        finite = torch.isfinite(expected) & torch.isfinite(actual)
        error = (actual - expected).abs() / (torch.where(finite, expected.abs(), 0.0) + scale)
        error = torch.where(finite & ~same, error, 0.0)
        return error.clamp(max=LARGEST_ERROR), ~finite & ~same


def significant_stride(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; the others carry no meaning."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1] if tensor.numel() else []
