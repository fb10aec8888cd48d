"""The Stop Conditions of a task: their wording, and whether a record meets them. All functions are pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..hardware import roofline
from .record import Record
from .task import Target

DOCUMENTED_ROWS = ("memory_bandwidth:", "peak_")  # of the citation that a target rests on
BASIS_VALUE = re.compile(r": ([\d.]+) (\S+) <-")  # of a citation (wiki.Row.citation)


@dataclass(frozen=True)
class Standing:
    """A target and the value that a version achieved, in the target's unit. The value is None if it was not
    measured. problem: see `off_basis`; such a target is not met."""

    target: Target
    achieved: float | None
    met: bool
    problem: str | None

    def to_json(self) -> dict:
        """The JSON object: the keys of the target, then those of its standing."""
        own = {"achieved": self.achieved, "met": self.met, "problem": self.problem}
        kind = {"documented": is_documented(self.target), "library_rate": is_library_rate(self.target)}
        return {**self.target.to_json(), **own, **kind}


def sign(metric: str) -> str:
    """Return the comparison sign for a metric and its target."""
    return "<=" if metric == "latency_us" else ">="


def stop_line(target: Target) -> str:
    """Format a Stop Condition for the README."""
    share = f"{target.share_pct:g} % of " if target.share_pct is not None else ""
    wanted = f"{target.metric} {sign(target.metric)} {target.target} {target.unit}"
    return f"- {target.workload}: {wanted}, {share}{target.basis}{reach(target)}"


def is_documented(target: Target) -> bool:
    """Return whether a target rests on a documented peak that was not measured."""
    return target.basis.startswith(DOCUMENTED_ROWS)


def is_library_rate(target: Target) -> bool:
    """Return whether a target rests on what a library reaches. A kernel that meets it may have more to gain."""
    return roofline.is_library_rate(target.basis.split(":")[0])


def is_of_other_cards(target: Target) -> bool:
    """Return whether a target rests on the rate that other cards sustained, which the wiki has. This one may differ."""
    return target.basis.split(":")[0].endswith(roofline.SUSTAINED) and "<workspace>" not in target.basis


def reach(target: Target) -> str:
    """Return `basis_note` in brackets, or nothing."""
    note = basis_note(target)
    return f" ({note})" if note else ""


def basis_note(target: Target) -> str:
    """Return the note for a target that rests only on documents, on a library's rate, or on what other cards sustain.
    Other targets have none."""
    if is_library_rate(target):
        return roofline.LIBRARY_RATE
    if is_of_other_cards(target):
        return "of other cards of that name"
    return "documented, may be out of reach" if is_documented(target) else ""


def standings(targets: Sequence[Target], record: Record | None) -> list[Standing]:
    """Compare each Stop Condition with the best record. None means that no version is accepted."""
    return [standing(target, achieved_value(target, record)) for target in targets]


def standing(target: Target, achieved: float | None) -> Standing:
    """Compare a target with the achieved value."""
    lower_is_better = sign(target.metric) == "<="
    reached = achieved is not None and (achieved <= target.target if lower_is_better else achieved >= target.target)
    problem = off_basis(target)
    return Standing(target, achieved, reached and problem is None, problem)


def are_met(targets: Sequence[Target], record: Record | None) -> bool:
    """Return whether the record meets every target. Without targets, return False."""
    return bool(targets) and all(checked.met for checked in standings(targets, record))


def off_basis(target: Target) -> str | None:
    """Return how a target differs from its share (share_pct) of the cited basis. Return None if it does not differ
    or cites nothing."""
    cited, share = BASIS_VALUE.search(target.basis), target.share_pct
    if cited is None or share is None:
        return None
    base = float(cited[1])
    if abs(target.target - share / 100 * base) <= 0.001 * base:
        return None
    message = f"{target.metric} {target.target} is not {share:g} % of its basis {cited[1]} {cited[2]}"
    of_problem = "ceiling of this problem" in target.basis
    return f"{message}; run: {'measure_ceiling.py' if of_problem else 'compute_utilization.py'} --set-targets"


def achieved_value(target: Target, record: Record | None) -> float | None:
    """Return the record's value for the target's metric, or None if it was not measured for that workload."""
    if record is None or record.performance.workload != target.workload:
        return None
    return getattr(record.performance, target.metric)
