"""The verdict on a kernel: the results of its cases, and the line that a reader of a right one sees first (of a wrong
one: failures.py). Pure functions."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from ..statuses import Status
from . import correctness
from .correctness import CaseResult

INTERPRETER = "cpu-interpreter"  # the device of a run without a GPU
MOST_NAMED = 5  # workloads and variants in one line
MOST_OF_REASON = 100  # characters of why a kernel declines
HARMLESS = (Status.OK, Status.DECLINED, Status.DOUBTFUL)  # of a case: a kernel with these is still right

# Seen on an H200: under ncu CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, and the list of kernels is empty.
NO_KERNEL_NAMED = (
    "torch's profiler (CUPTI) named no kernel of a call; end what else profiles this GPU or runs round this program "
    "(nsys, ncu, DCGM), use a torch whose libcupti fits the driver, and run it again"
)


@dataclass(frozen=True)
class ProcessEnd:
    """How the candidate's process ended. signal: its name, None where the process ended by itself."""

    exit: int | None
    signal: str | None
    wall_s: float
    log_tail: str


@dataclass(frozen=True)
class SanitizerRun:
    """The report of compute-sanitizer's memcheck on one run. why_not: the reason why it did not run; then errors is
    None."""

    errors: int | str | None = None
    why_not: str | None = None

    def to_json(self) -> dict:
        if self.why_not is not None:
            return {"ran": False, "why": self.why_not}
        return {"ran": True, "tool": "memcheck", "errors": self.errors}

    @classmethod
    def from_json(cls, run: dict) -> "SanitizerRun":
        return cls(run.get("errors"), run.get("why"))


@dataclass(frozen=True)
class Verdict:
    """The result of a verification: its status, and a summary in one line.

    worst_rel_err: largest error over (|reference| + scale), None where nothing was compared. tolerance: the bound on
    it, or "by dtype". own_work: of correctness.own_work. sandbox: how the candidate was confined. process: None where
    no process of the candidate's ran. sanitizer: None when it was not requested. declared: what the reference declares
    (worker.declarations). left_out: variants on which the reference itself fails."""

    status: Status
    device: str
    summary: str
    worst_rel_err: float | None = None
    tolerance: float | str = "by dtype"
    own_work: str | None = None
    sandbox: str | None = None
    cases: tuple[CaseResult, ...] = ()
    process: ProcessEnd | None = None
    sanitizer: SanitizerRun | None = None
    declared: dict = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values = {name: value for name, value in values.items() if value or name not in ("declared", "left_out")}
        values["cases"] = [case.to_json() for case in self.cases]
        values["process"] = self.process and vars(self.process)
        sanitizer = values.pop("sanitizer")
        return values | ({"sanitizer": sanitizer.to_json()} if sanitizer else {})

    @classmethod
    def from_json(cls, verdict: dict) -> "Verdict":
        values = {**verdict, "status": Status(verdict["status"])}
        values["cases"] = tuple(map(CaseResult.from_json, verdict.get("cases", ())))
        values["left_out"] = tuple(verdict.get("left_out", ()))
        values["process"] = verdict.get("process") and ProcessEnd(**verdict["process"])
        values["sanitizer"] = verdict.get("sanitizer") and SanitizerRun.from_json(verdict["sanitizer"])
        return cls(**values)


def with_task(verdict: Verdict, declared: dict, left_out: list[str], fixed: dict[str, int]) -> Verdict:
    """The verdict, which names the task's declarations, the variants that the reference itself fails on, and of a right
    kernel the inputs that hold one whole number in all cases."""
    remarks = [verdict.summary]
    if fixed and verdict.status == Status.OK:
        held = some_of([f"'{name}' is always {number}" for name, number in fixed.items()])
        remarks.append(f"{held}: draw other whole numbers in get_inputs where they are possible")
    if left_out:
        count = f"{len(left_out)} variant{'s' * (len(left_out) > 1)}"
        remarks.append(f"left out {count} on which the reference itself fails: {some_of(left_out)}")
    if declared:
        named = (f"{key.upper()} {sizes(value) if key == 'sizes' else shown(value)}" for key, value in declared.items())
        remarks.append(f"the task declares {'; '.join(named)}")
    return replace(verdict, declared=declared, left_out=tuple(left_out), summary="; ".join(remarks))


def some_of(names: Sequence[str]) -> str:
    """ "a, b, c": an imported task may have a hundred workloads, and JSON has all of their names."""
    more = len(names) - MOST_NAMED
    return ", ".join(names) if more < 2 else f"{', '.join(names[:MOST_NAMED])} and {more} more"


def sizes(of_workloads: dict[str, dict[str, int]]) -> str:
    """The sizes of the first workload, for a summary."""
    name, own = next(iter(of_workloads.items()))
    others = len(of_workloads) - 1
    return f"{name}: {shown(own)}" + f", and those of {others} other workload{'s' * (others > 1)}" * bool(others)


def shown(value) -> str:
    """A declaration's value for a summary."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(own)}" for key, own in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def bad_case(cases: list[CaseResult]) -> CaseResult | None:
    """The first case that makes the kernel wrong."""
    return next((case for case in cases if case.status not in HARMLESS), None)


def right(device: str, cases: list[CaseResult], own_work: str) -> str:
    """The summary of a kernel that is right. It says so where no other size was tried, asked for or not."""
    names = some_of(list(dict.fromkeys(case.workload for case in cases)))
    resized = any(case.resized and case.status == Status.OK for case in cases)
    found = f"{Status.OK}{'' if resized else ', at its own sizes alone,'}"
    declined = sum(case.status == Status.DECLINED for case in cases)
    count = f"{len(cases)} cases" + f" ({declined} of them declined)" * bool(declined)
    summary = f"{found} on {device}: {count}, workloads {names}; worst error {worst_error(cases):.3g}"
    return "; ".join([summary, *remarks(cases), *unchecked_work(device, own_work)])


def unchecked_work(device: str, own_work: str) -> Iterator[str]:
    if device == INTERPRETER:
        yield "programs run one after the other here, so races do not show"
    if own_work == correctness.NOT_CHECKED and device == INTERPRETER:
        yield "only a GPU shows whether its own kernels do the work"
    elif own_work == correctness.NOT_CHECKED:
        yield f"OWN WORK NOT CHECKED: {NO_KERNEL_NAMED}"


def worst_error(cases: list[CaseResult]) -> float | None:
    return max((case.observed.max_rel if case.observed else 0.0 for case in cases), default=None)


def remarks(cases: list[CaseResult]) -> Iterator[str]:
    """Remarks for a reader about a kernel that is right."""
    judged = [case for case in cases if case.status == Status.OK]
    if refused := declined(cases):
        yield f"declines {some_of(refused)}"
    for case in cases:
        if case.status == Status.DOUBTFUL:
            yield f"NOT RIGHT on {case.variant} ({case.message[:120]})"
    yield from unsteady(judged)
    if any(case.variant for case in cases) and not any(case.resized for case in cases):
        yield "no size could be varied, so only the task's own were tried; keyword sizes of get_inputs allow others"
    outputs = (pair for case in judged for pair in enumerate(case.observed.outputs))
    yield from dict.fromkeys(f"output {at}: {one.few_draws}" for at, one in outputs if one.few_draws)
    if bare := sum(case.observed.fails_guarded for case in judged):
        yield f"{bare} cases without guard bands around the outputs, with which the kernel fails"


def unsteady(judged: list[CaseResult]) -> Iterator[str]:
    """A remark where calls on the same contents differ, with their share in the workload where it is largest."""
    cases = [case for case in judged if case.observed.deterministic is False]
    if not cases:
        return
    most = max(cases, key=lambda case: case.observed.differing / max(case.observed.repeats, 1))
    observed = most.observed
    few = f"{observed.differing} of {observed.repeats} calls on the same contents differ from the first"
    shown = f"{few} (workload {most.workload})" if observed.differing else "two calls on the same contents differ"
    yield f"{shown}: atomic additions in another order, or a race"


def declined(cases: list[CaseResult]) -> list[str]:
    """What the kernel declines, by its reason, which may differ in numbers: 'prime sizes (ValueError: 13 is odd)'."""
    served = {case.variant for case in cases if case.status == Status.OK}
    by_reason: dict[str, tuple[str, dict[str, None]]] = {}
    for case in (case for case in cases if case.status == Status.DECLINED):
        reason = case.message.strip().partition("\n")[0][:MOST_OF_REASON]
        _, variants = by_reason.setdefault(re.sub(r"\d+", "0", reason), (reason, {}))
        variants[case.variant + " in part" * (case.variant in served)] = None
    return [f"{some_of([*variants])} ({reason})" for reason, variants in by_reason.values()]


def place(case: CaseResult) -> str:
    """Which case it is, for a message."""
    variant = f", {case.variant}" if case.variant else ""
    return f"workload {case.workload}, seed {case.seed}{variant}"
