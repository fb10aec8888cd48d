"""The Stop Conditions of a task: how they read, and whether a record meets them. Pure functions of recorded
evidence."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .record import Record
from .task import Target

DOCUMENTED_ROWS = ("memory_bandwidth:", "peak_")  # of the citation that a target rests on
BASIS_VALUE = re.compile(r": ([\d.]+) (\S+) <-")  # of a citation (wiki.Row.citation)


@dataclass(frozen=True)
class Standing:
    """A target beside what a version achieved, in the target's unit; None where that was not measured. problem: see
    `off_basis`; such a target is not met."""

    target: Target
    achieved: float | None
    met: bool
    problem: str | None

    def to_json(self) -> dict:
        """The JSON object: the keys of the target, then those of its standing."""
        own = {"achieved": self.achieved, "met": self.met, "problem": self.problem}
        return {**self.target.to_json(), **own, "documented": is_documented(self.target)}


def sign(metric: str) -> str:
    """On which side of its target a metric should be."""
    return "<=" if metric == "latency_us" else ">="


def stop_line(target: Target) -> str:
    """A Stop Condition as the README says it."""
    share = f"{target.share_pct:g} % of " if target.share_pct is not None else ""
    wanted = f"{target.metric} {sign(target.metric)} {target.target} {target.unit}"
    return f"- {target.workload}: {wanted}, {share}{target.basis}{reach(target)}"


def is_documented(target: Target) -> bool:
    """Does a target rest on a documented peak, which nobody measured on such a card?"""
    return target.basis.startswith(DOCUMENTED_ROWS)


def reach(target: Target) -> str:
    """What to add to a target that rests on paper alone."""
    return " (documented, may be out of reach)" if is_documented(target) else ""


def standings(targets: Sequence[Target], record: Record | None) -> list[Standing]:
    """Each Stop Condition against the best record; None: no version is accepted."""
    return [standing(target, achieved_value(target, record)) for target in targets]


def standing(target: Target, achieved: float | None) -> Standing:
    """A target against the value that was achieved."""
    lower_is_better = sign(target.metric) == "<="
    reached = achieved is not None and (achieved <= target.target if lower_is_better else achieved >= target.target)
    problem = off_basis(target)
    return Standing(target, achieved, reached and problem is None, problem)


def are_met(targets: Sequence[Target], record: Record | None) -> bool:
    """Does the record meet every target? False when there is no target."""
    return bool(targets) and all(checked.met for checked in standings(targets, record))


def off_basis(target: Target) -> str | None:
    """How a target differs from the share (share_pct) of its cited basis that Step 0 made it; None where it does
    not, or cites nothing."""
    cited, share = BASIS_VALUE.search(target.basis), target.share_pct
    if cited is None or share is None:
        return None
    base = float(cited[1])
    if abs(target.target - share / 100 * base) <= 0.001 * base:
        return None
    message = f"{target.metric} {target.target} is not {share:g} % of its basis {cited[1]} {cited[2]}"
    tool = (
        "compute_utilization.py --set-targets"
        if "gpu-wiki" in target.basis
        else "measure_bandwidth_ceiling.py --set-target"
    )
    return f"{message}; run: {tool}"


def achieved_value(target: Target, record: Record | None) -> float | None:
    """What a record says of the target's metric; None where it was not measured for that workload."""
    if record is None or record.performance.workload != target.workload:
        return None
    return getattr(record.performance, target.metric)
