"""How a task wants an output compared: the modes of COMPARE, read and applied.

    {"atol": 1e-2, "rtol": 1e-2}    an element may be off by atol + rtol * |reference|
    {"share": 0.99, "cap": 0.5}     this share of the elements must be within the bound, and none off by more than cap
    {"rms": 0.005}                  rms of the error over the rms of the reference; in place of a bound for each element
    {"ties": "scores"}              indices: unique, in range, and the input `scores` equal where they point, or within
                                    atol and rtol; a function of the inputs computes scores that are no input; with
                                    {"set": -1} in any order of a row
    {"set": -1}                     equal as sets along that dimension, or within the groups that an input of offsets or
                                    a function of the inputs states
    {"valid": lambda x, n: mask}    only where the function of the inputs says so

The modes of one output hold together; ties and set exclude each other and most of the rest.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy
import torch

from ..case_types import OutputCheck, OutputErrors
from . import accuracy
from .contract import InvalidDeclaration

# The largest values that a task may declare. A looser bound would pass kernels that leave out a part of the work.
LIMITS = {"atol": (0.0, math.inf), "rtol": (0.0, 0.5), "share": (0.9, 1.0), "cap": (0.0, math.inf), "rms": (0.0, 0.1)}
COUNTABLE = 256  # elements: of fewer, chance moves the share that is within a bound
DEFAULT_CAP = 0.5  # of (|reference| + scale), where not every element must be within a bound and no cap is declared


@dataclass(frozen=True)
class Comparison:
    """The modes of one output; None where a mode is not declared. group: the value of "set"."""

    parameters: tuple[str, ...]
    atol: float | None = None
    rtol: float | None = None
    share: float = 1.0
    cap: float | None = None
    rms: float | None = None
    ties: str | Callable | None = None
    group: int | str | Callable | None = None
    valid: Callable | None = None

    @property
    def bounded(self) -> bool:
        """Does it replace the bound of the dtype?"""
        return any(value is not None for value in (self.atol, self.rtol, self.cap, self.rms)) or self.share < 1

    def to_json(self) -> dict[str, float | int | str]:
        """The declared modes; a function by its name."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "parameters"}
        named = {"set" if name == "group" else name: value for name, value in own.items() if value is not None}
        if named["share"] == 1.0:
            del named["share"]
        return {name: named_after(value) if callable(value) else value for name, value in named.items()}


def named_after(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def read(output: int | str, modes, parameters: tuple[str, ...]) -> Comparison:
    """The modes of an output as COMPARE states them. Raises InvalidDeclaration for any other."""
    where = f"COMPARE[{output!r}]"
    if not isinstance(modes, dict) or not modes:
        raise InvalidDeclaration(f'{where} must be a dict of modes, such as {{"atol": 1e-2, "rtol": 1e-2}}')
    known = (*LIMITS, "ties", "set", "valid")
    if unknown := [mode for mode in modes if mode not in known]:
        raise InvalidDeclaration(f"{where} has the mode {unknown[0]!r}; the modes are {', '.join(known)}")
    for mode in LIMITS:
        if mode in modes:
            check_number(where, mode, modes[mode])
    if "ties" in modes and not (callable(modes["ties"]) or modes["ties"] in parameters):
        raise InvalidDeclaration(
            f"{where}: ties must name the parameter of forward that holds the scores, or be a function of the inputs "
            "that returns them"
        )
    if "set" in modes:
        check_group(where, modes["set"], parameters)
    if "valid" in modes and not callable(modes["valid"]):
        raise InvalidDeclaration(f"{where}: valid must be a function of the inputs that returns a mask")
    unordered = {"set"} if modes.get("set") == -1 and "valid" not in modes else set()
    if "ties" in modes and set(modes) - {"ties", "valid", "atol", "rtol"} - unordered:
        raise InvalidDeclaration(f'{where}: ties goes with valid, atol and rtol alone, or with "set": -1')
    if "set" in modes and "ties" not in modes and set(modes) - {"set", "valid"}:
        raise InvalidDeclaration(f"{where}: set goes with valid alone")
    own = {"group" if mode == "set" else mode: value for mode, value in modes.items()}
    return Comparison(parameters, **own)


def check_number(where: str, mode: str, value) -> None:
    low, high = LIMITS[mode]
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (value == 0 and mode in ("cap", "rms")):
        limit = "a number from 0" if high == math.inf else f"a number from {low:g} to {high:g}"
        raise InvalidDeclaration(f"{where}: {mode} is {value!r}; it must be {limit}")


def check_group(where: str, value, parameters: tuple[str, ...]) -> None:
    if not (type(value) is int or callable(value) or value in parameters):
        raise InvalidDeclaration(
            f"{where}: set must be the dimension along which the elements form a set, the name of the parameter that "
            "holds the offsets of the groups, or a function of the inputs that returns each element's group"
        )


def of_inputs(mode: str, function: Callable, parameters: tuple[str, ...], inputs: list):
    """The result of a declared function. It gets the inputs that its parameters name, or all of them. Raises
    InvalidDeclaration where it raises."""
    named = dict(zip(parameters, inputs, strict=False))
    try:
        accepted = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # one that is written in C
        accepted = []
    try:
        if accepted and all(name in named for name in accepted):
            return function(**{name: named[name] for name in accepted})
        return function(*inputs)
    except Exception as error:
        raise InvalidDeclaration(
            f"the function `{mode}` in COMPARE raises {type(error).__name__}: {error}; it gets the inputs that its "
            "parameters name, or all of them"
        ) from error


def compare(
    actual: torch.Tensor,
    bounds: accuracy.Bounds,
    declared: Comparison | None,
    inputs: list,
    roughly: float = 0.0,
) -> OutputCheck:
    """bounds.check, or what the declared modes make of the errors.

    inputs: of the call, before it. roughly: a share of (|reference| + scale) by which any element may be off, on values
    that the task does not have.
    """
    usual = bounds.check(actual)
    if declared is None or usual.errors is None:
        return usual
    mask = mask_of(declared, inputs, bounds.baseline)
    if declared.ties:
        return replace(usual, errors=ties(usual.errors, actual, bounds.baseline, mask, declared, inputs))
    parts, scale, errors = [actual, bounds.oracle, bounds.baseline], bounds.scale, usual.errors
    if mask is not None or declared.group is not None:
        parts, scale = chosen(parts, bounds, mask, declared, inputs)
        errors = accuracy.Bounds(*parts[1:], bounds.tolerance, bounds.least_rms, scale).errors_of(parts[0])
    if mask is not None and errors.first_bad_index is not None:
        index = int(mask.reshape(-1).nonzero()[errors.first_bad_index])
        errors = replace(errors, first_bad_index=index)
    return replace(usual, errors=bounded(*parts, scale, errors, declared, roughly) if declared.bounded else errors)


def chosen(
    tensors: list[torch.Tensor],
    bounds: accuracy.Bounds,
    mask: torch.Tensor | None,
    declared: Comparison,
    inputs: list,
) -> tuple[list[torch.Tensor], accuracy.Scale]:
    """(the tensors, the oracle second, flat: what the mask chooses, each group of a set in ascending order; the scale
    of these elements)"""
    parts = [tensor.reshape(-1) if mask is None else tensor[mask] for tensor in tensors]
    if declared.group is None:
        return parts, accuracy.scale_at(bounds.oracle, mask, bounds.least_rms)
    groups = groups_of(declared, inputs, bounds.baseline)
    groups = groups.reshape(-1) if mask is None else groups[mask]
    return [sorted_within(tensor, groups) for tensor in parts], accuracy.scale_of(parts[1], bounds.least_rms)


def mask_of(declared: Comparison, inputs: list, output: torch.Tensor) -> torch.Tensor | None:
    """Which elements of an output count; None for all of them."""
    if declared.valid is None:
        return None
    mask = of_inputs("valid", declared.valid, declared.parameters, inputs)
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise InvalidDeclaration("the function `valid` in COMPARE must return a tensor of bool")
    while mask.dim() < output.dim() and mask.shape == output.shape[: mask.dim()]:
        mask = mask.unsqueeze(-1)  # a mask of rows
    try:
        return mask.to(output.device).expand(output.shape)
    except RuntimeError:
        raise InvalidDeclaration(
            f"the function `valid` in COMPARE returns the shape {list(mask.shape)} for an output of "
            f"{list(output.shape)}"
        ) from None


def ties(
    usual: OutputErrors,
    actual: torch.Tensor,
    baseline: torch.Tensor,
    mask: torch.Tensor | None,
    declared: Comparison,
    inputs: list,
) -> OutputErrors:
    """The errors of indices along the last dimension of the scores: wrong where one is out of range, comes twice in its
    row, or points to another score than the reference's index in its place. As a set: in the order of the scores, and
    out of range where the reference's are, such as -1 for none. How far two indices lie apart is no error."""
    scores = scores_of(declared, inputs, actual.device)
    if not isinstance(scores, torch.Tensor) or actual.is_floating_point() or 0 in (scores.dim(), *scores.shape[-1:]):
        raise InvalidDeclaration("ties in COMPARE needs an output of whole numbers and a tensor of scores")
    flat = actual.dim() == scores.dim() - 1  # one index a row, as argmax gives it
    got, expected = (tensor.long().unsqueeze(-1) if flat else tensor.long() for tensor in (actual, baseline))
    counted = torch.ones_like(got, dtype=torch.bool) if mask is None else mask.reshape(got.shape)
    count = scores.shape[-1]
    inside = (got >= 0) & (got < count)
    (chosen, none), (wanted, expected_none) = (pointed_to(scores, at) for at in (got, expected))
    equal, outside = got == expected, ~inside
    if declared.group is not None:
        chosen, wanted, none, expected_none = (x.sort(dim=-1).values for x in (chosen, wanted, none, expected_none))
        equal, outside = torch.zeros_like(inside), none != expected_none
    elif (counted & (expected >= count)).any():
        raise InvalidDeclaration(
            "ties in COMPARE: the reference's own indices reach beyond the last dimension of scores of "
            f"{list(scores.shape)}"
        )
    bound = (declared.atol or 0.0) + (declared.rtol or 0.0) * torch.where(wanted.isfinite(), wanted.abs(), 0.0)
    equal |= (chosen == wanted) | ((chosen - wanted).abs() <= bound)
    again = repeated(got, counted & inside)
    wrong = counted & (outside | ~equal | again)
    harmless = {"max_rel": 0.0, "mismatches": 0, "nonfinite": 0, "lost_pct": 0.0}
    bad = int(wrong.sum())
    if not bad:
        return replace(usual, **harmless, outside=0, first_bad_index=None, refused=None)
    first = int(wrong.reshape(-1).nonzero()[0])
    if declared.group is not None:
        first = telling(first, got, expected, again)
    where, cause = named_place(got, first), cause_of(first, inside, again, outside)
    how_many = counted_rows(wrong) if declared.group is not None else counted_indices(bad)
    why = f"{how_many}: {int(got.reshape(-1)[first])}{where} {cause}"
    return replace(usual, **harmless, outside=bad, first_bad_index=first, refused=why)


def telling(first: int, got: torch.Tensor, expected: torch.Tensor, again: torch.Tensor) -> int:
    """The flat place of a wrong index in the set that holds the place `first`: one that comes twice or that the
    reference's set lacks, where there is one."""
    width = got.shape[-1]
    row = first // width
    own, reference, twice = (one.reshape(-1, width)[row] for one in (got, expected, again))
    places = (twice | ~torch.isin(own, reference)).nonzero()
    return row * width + int(places[0]) if len(places) else first


def named_place(got: torch.Tensor, at: int) -> str:
    """ " in row 3 at place 1", from a flat place; a row of several dimensions as a list."""
    *row, place = (int(number) for number in numpy.unravel_index(at, got.shape))
    of_row = f" in row {row[0] if len(row) == 1 else row}" if row else ""
    return of_row + f" at place {place}" * (got.shape[-1] > 1)


def cause_of(at: int, inside: torch.Tensor, again: torch.Tensor, outside: torch.Tensor) -> str:
    """Why the index at a flat place is wrong. outside: in a set, somewhere in its row."""
    width = inside.shape[-1]
    if not inside.reshape(-1)[at]:
        return "is out of range"
    if again.reshape(-1)[at]:
        return "comes twice in its row"
    if outside.reshape(-1, width)[at // width].any() and inside.reshape(-1, width)[at // width].all():
        return "stands where the reference has none"
    return "points to another score than the reference's"


def counted_indices(count: int) -> str:
    return "1 index is wrong" if count == 1 else f"{count} indices are wrong; the first"


def counted_rows(wrong: torch.Tensor) -> str:
    count = int(wrong.any(-1).sum())
    return "1 row has wrong indices" if count == 1 else f"{count} rows have wrong indices; the first"


def scores_of(declared: Comparison, inputs: list, device: torch.device):
    """What the indices of an output point into: an input, or what the declared function computes from the inputs."""
    if callable(declared.ties):
        scores = of_inputs("ties", declared.ties, declared.parameters, inputs)
    else:
        scores = inputs[declared.parameters.index(declared.ties)]
    return scores.to(device) if isinstance(scores, torch.Tensor) else scores


def pointed_to(scores: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the scores at indices, infinite where one is out of range; those out of range, the largest whole number for any
    other)."""
    count = scores.shape[-1]
    inside = (at >= 0) & (at < count)
    there = accuracy.comparable(gathered(scores, at.clamp(0, count - 1))).double()
    return torch.where(inside, there, math.inf), torch.where(inside, torch.iinfo(torch.long).max, at)


def gathered(scores: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The scores at indices along their last dimension; other dimensions of the indices must be those of the scores."""
    if scores.dim() != at.dim() or scores.shape[:-1] != at.shape[:-1]:
        raise InvalidDeclaration(
            f"ties in COMPARE: indices of {list(at.shape)} do not point along the last dimension of scores of "
            f"{list(scores.shape)}"
        )
    return scores.gather(-1, at)


def repeated(at: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Where an index comes a second time in its row."""
    apart = -1 - torch.arange(at.shape[-1], device=at.device)  # what does not count repeats nothing
    order = torch.where(counted, at, apart).sort(dim=-1, stable=True)
    again = torch.zeros_like(counted)
    again[..., 1:] = order.values[..., 1:] == order.values[..., :-1]
    return torch.zeros_like(again).scatter(-1, order.indices, again)


def groups_of(declared: Comparison, inputs: list, output: torch.Tensor) -> torch.Tensor:
    """The group of each element of an output, for a comparison as sets."""
    group = declared.group
    places = torch.arange(output.numel(), device=output.device).view(output.shape)
    if isinstance(group, int):
        if not -output.dim() <= group < output.dim():
            raise InvalidDeclaration(f"set in COMPARE is {group}, but the output has {output.dim()} dimensions")
        return places.narrow(group, 0, 1).expand(output.shape) if output.numel() else places
    if isinstance(group, str):
        offsets = inputs[declared.parameters.index(group)].to(output.device)
        rows = torch.bucketize(torch.arange(len(output), device=output.device), offsets.contiguous(), right=True)
        return rows.view(-1, *[1] * (output.dim() - 1)).expand(output.shape)
    groups = of_inputs("set", group, declared.parameters, inputs).to(output.device)
    if groups.is_floating_point() or groups.shape != output.shape:
        raise InvalidDeclaration("the function `set` in COMPARE must return a whole number for each element")
    return groups


def sorted_within(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Flat values by group, each group in ascending order."""
    order = accuracy.comparable(values).argsort(stable=True)
    return values[order[groups[order].argsort(stable=True)]]


def bounded(
    actual: torch.Tensor,
    oracle: torch.Tensor,
    baseline: torch.Tensor,
    scale: accuracy.Scale,
    usual: OutputErrors,
    declared: Comparison,
    roughly: float,
) -> OutputErrors:
    """The errors of an output under declared bounds. An element within the bound of the reference in the task's own
    dtype is right too."""
    actual, oracle, baseline = (tensor.reshape(-1) for tensor in (actual, oracle, baseline))
    count, beyond, largest, squares = 0, 0, 0.0, 0.0
    for start in range(0, oracle.numel(), accuracy.CHUNK):
        stop = min(start + accuracy.CHUNK, oracle.numel())
        error, size = least_error(*(accuracy.comparable(one[start:stop]) for one in (actual, oracle, baseline)))
        weighed = size + scale.of(start, stop)
        allowed = bound_of(declared, size, weighed, usual.bound)
        cap = declared.cap if declared.cap is not None else torch.maximum(allowed, DEFAULT_CAP * weighed)
        count += int((error > torch.maximum(allowed, roughly * weighed)).sum()) if declared_alone(declared) else 0
        beyond += int((error > torch.clamp(roughly * weighed, min=0.0).maximum(torch.as_tensor(cap).to(error))).sum())
        largest = max(largest, float(error.max()))
        squares += float(error.square().sum())
    total = max(oracle.numel(), 1)
    rms = math.sqrt(squares / total)
    refused = None
    if count > may_be_off(declared.share, total):
        refused = f"{count} elements ({100 * count / total:.3g} %) are off by more than the declared bound"
    elif beyond:
        refused = f"{beyond} elements are off by more than the cap; the largest error is {largest:.3g}"
    elif declared.rms is not None and rms > max(declared.rms, roughly) * usual.rms:
        share = rms / usual.rms if usual.rms else math.inf
        refused = f"the rms of the error is {share:.3g} of the reference's, more than the declared {declared.rms:g}"
    return replace(usual, mismatches=0, outside=count, refused=refused, lost_pct=0.0)


def may_be_off(share: float, total: int) -> int:
    """How many of so many elements may be off, where a share must be within the bound. Of few, chance may put more
    than their share beyond it: as many as in one case of 10,000."""
    most = math.ceil((1 - share) * total - 1e-6)
    if total < COUNTABLE:
        left = 1 - sum(chance(share, total, off) for off in range(most + 1))
        while left > 1e-4:
            most += 1
            left -= chance(share, total, most)
    return most


def chance(share: float, total: int, off: int) -> float:
    """The probability that so many elements are off."""
    return math.comb(total, off) * (1 - share) ** off * share ** (total - off)


def declared_alone(declared: Comparison) -> bool:
    """Must elements be within a bound? With nothing but an rms, or a cap beside it, they need not."""
    return declared.rms is None or declared.atol is not None or declared.rtol is not None or declared.share < 1


def least_error(actual: torch.Tensor, exact: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(absolute error of each element against the oracle or the baseline, whichever is nearer; |reference|).

    Elements without a finite reference or result have no error here; accuracy.compare counts them."""
    got, exact, theirs = (tensor.double() for tensor in (actual, exact, theirs))
    errors = [
        torch.where(torch.isfinite(got) & torch.isfinite(one), (got - one).abs(), math.inf) for one in (exact, theirs)
    ]
    error = torch.minimum(*errors)
    return torch.where(error.isinf(), 0.0, error), torch.where(torch.isfinite(exact), exact.abs(), 0.0)


def bound_of(declared: Comparison, size: torch.Tensor, weighed: torch.Tensor, usual: float) -> torch.Tensor:
    """The error that each element may have. size: its |reference|; weighed: that and its scale."""
    if declared.atol is None and declared.rtol is None:
        return usual * weighed
    return (declared.atol or 0.0) + (declared.rtol or 0.0) * size
