"""A task as the readers hand it on: the source's code, the functions around it, its workloads and bounds."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import UsageError
from .provenance import Origin

FLOATS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
# One rounding step: the distance of neighbouring numbers, over the number.
STEPS = {"float16": 2**-10, "bfloat16": 2**-7, **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz"), 2**-3)}
STEPS |= dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz"), 2**-2)
UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.=-]+")
LONG, SHORT = 24, 8  # characters of a name; a UUID has 36
# Names that a reference defines itself, so that a source's own of that name is called otherwise.
RESERVED = {
    *("Model", "ModelNew", "kernel_function", "get_inputs", "get_init_inputs", "get_workloads", "make_inputs"),
    *("probabilities", "stored", "DATA", "SIZES"),
    *("MUTATES", "COMPARE", "SAMPLES", "LAYOUTS"),
}
LEAST_SHARE, MOST_RTOL = 0.9, 0.5  # the loosest that COMPARE takes (docs/declarations.md)


@dataclass(frozen=True)
class Options:
    """What the user said besides the source. workloads: their file. blobs: the folder of stored tensors. default: the
    name of the workload that counts most. most: how many workloads to take."""

    workloads: Path | None = None
    blobs: Path | None = None
    default: str | None = None
    most: int | None = None


@dataclass(frozen=True)
class Workload:
    """weight: grows with its work. maker: the expression of a function that makes its inputs; None where its sizes, as
    keywords of get_inputs, say it all."""

    name: str
    sizes: dict[str, int]
    weight: int
    maker: str | None = None


@dataclass(frozen=True)
class Bounds:
    """How far an output may be off, as modes of COMPARE, by its dtype. usual: of the other floating dtypes; None
    leaves them to the verifier. Whole numbers are always compared exactly."""

    usual: dict[str, float] | None = None
    by_dtype: dict[str, dict[str, float]] = field(default_factory=dict)

    def of(self, dtype: str) -> dict[str, float] | None:
        modes = self.stated(dtype)
        return {**modes, "rtol": STEPS[dtype]} if self.is_below_rounding(dtype) else modes

    def stated(self, dtype: str) -> dict[str, float] | None:
        return self.by_dtype.get(dtype, self.usual) if dtype in FLOATS else None

    def is_below_rounding(self, dtype: str) -> bool:
        """Is the relative bound less than what rounding the exact result to the dtype may cost? Then a right kernel
        that adds in another order would be refused."""
        modes = self.stated(dtype) or {}
        return 0 < modes.get("rtol", 0) < STEPS.get(dtype, 0) / 2

    def takes_zeros(self, dtype: str, rms: float | None) -> bool:
        """Is the absolute bound larger than an output of that rms itself? Then an output of zeros is within it."""
        return bool(rms) and (self.stated(dtype) or {}).get("atol", 0) > rms

    def remarks(self, outputs: Sequence[tuple[str, float | None]]) -> list[str]:
        """What is not as in the source, for outputs of these dtypes and rms."""
        made = []
        for at, (dtype, rms) in enumerate(outputs):
            if self.takes_zeros(dtype, rms):
                made.append(
                    f"tolerance: atol {self.stated(dtype)['atol']:g} is more than output {at} itself (rms {rms:.2g}), "
                    "so that zeros would pass; the verifier's own bounds by dtype hold for it"
                )
            elif self.is_below_rounding(dtype):
                made.append(
                    f"tolerance: rtol {self.stated(dtype)['rtol']:g} is less than rounding to {dtype} costs; here it "
                    f"is one rounding step, {STEPS[dtype]:.2g}"
                )
        return list(dict.fromkeys(made))


@dataclass(frozen=True)
class Wrapped:
    """A function of the source as the forward of Model, whose parameters the task has. call: the expression that calls
    it. outputs: names of what it returns, where the source names them."""

    call: str
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """code: of the source. model: None where the code defines Model. parameters: of forward, as far as they have names.
    inputs: the text of get_inputs and what it needs. workloads: the default one first. ties: the parameter to whose
    scores outputs of whole numbers point. contiguous: are inputs always that? more: further declarations, as text.
    lazy_annotations: does the code count on them? remarks: what is not carried over."""

    format: str
    name: str
    description: str
    origin: Origin
    code: str
    model: Wrapped | None
    parameters: tuple[str, ...]
    inputs: str
    workloads: tuple[Workload, ...]
    bounds: Bounds = Bounds()
    ties: str | None = None
    contiguous: bool = False
    more: str = ""
    lazy_annotations: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def smallest(self) -> str:
        """The name that the reference has for its smallest workload."""
        first = min(self.workloads, key=lambda workload: workload.weight)
        return "default" if first is self.workloads[0] else first.name


def tolerated(
    atol: float, rtol: float, share: float = 1.0, cap: float | None = None
) -> tuple[dict[str, float], list[str]]:
    """(modes of COMPARE, remarks on those that are stricter than the source's)."""
    modes, remarks = {"atol": atol, "rtol": min(rtol, MOST_RTOL)}, []
    if rtol > MOST_RTOL:
        remarks.append(f"tolerance: rtol {rtol:g} is carried as {MOST_RTOL:g}, the most that a task may declare")
    if share < 1:
        modes["share"] = max(share, LEAST_SHARE)
    if share < LEAST_SHARE:
        remarks.append(
            f"tolerance: a matched ratio of {share:g} is carried as {LEAST_SHARE:g}, the least that a task may declare"
        )
    if cap:
        modes["cap"] = cap
    return modes, remarks


def number(value, where: str) -> float:
    """A tolerance; PyYAML reads 5e-2 as text. UsageError for anything that is no finite number from 0 on."""
    try:
        result = float(value) if type(value) in (int, float, str) else math.nan
    except ValueError:
        result = math.nan
    if not (math.isfinite(result) and result >= 0):
        raise UsageError(f"{where} is {value!r}; it must be a number from 0 on")
    return result


def chosen(
    workloads: Sequence[Workload], options: Options, default: str | None = None
) -> tuple[tuple[Workload, ...], list[str]]:
    """(the workloads to take, the default one first; remarks). default: its name where the source says it, else it is
    the one with the most work."""
    if not workloads:
        raise UsageError("no workload is left")
    named = distinct(workloads)
    if options.default and options.default not in [one.name for one in named]:
        known = ", ".join(one.name for one in named[:12])
        raise UsageError(f"--default: there is no workload {options.default!r}; it has: {known}")
    wanted = options.default or default
    first = next((one for one in named if one.name == wanted), max(named, key=lambda one: one.weight))
    rest = [one for one in named if one is not first]
    if options.most is None or len(named) <= options.most:
        return (first, *rest), []
    taken = spread(sorted(rest, key=lambda one: one.weight), options.most - 1)
    left = [one.name for one in rest if one not in taken]
    return (first, *(one for one in rest if one in taken)), [f"workloads left out by --most: {', '.join(left)}"]


def distinct(workloads: Sequence[Workload]) -> list[Workload]:
    """The workloads with names that are short, printable and each another; `default` is get_inputs' own."""
    starts = Counter(one.name[:SHORT] for one in workloads)
    seen: Counter[str] = Counter()
    names = []
    for one in workloads:
        is_clear = len(one.name) > LONG and starts[one.name[:SHORT]] == 1
        name = UNPRINTABLE.sub("_", one.name[:SHORT] if is_clear else one.name)[:60] or "workload"
        name += "_" * (name == "default")
        names.append(f"{name}-again{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return [replace(one, name=name) for one, name in zip(workloads, names, strict=True)]


def spread(workloads: Sequence[Workload], count: int) -> list[Workload]:
    """So many of the workloads, evenly from the first to the last."""
    if count <= 1:
        return list(workloads[:count])
    return [workloads[round(at * (len(workloads) - 1) / (count - 1))] for at in range(count)]
