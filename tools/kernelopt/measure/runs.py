"""Runs of a candidate on cases: the task's own inputs in one process, the variants in others beside it.

A kernel is compiled anew for many a variant, so processes side by side take a fraction of the time. Nothing is timed
here. The processes share the GPU only where its memory holds the inputs and outputs of all.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ..device import gpu, outcomes, standing
from ..device.gpu_memory import VERIFYING_BYTES, VERIFYING_SHARE
from ..device.outcomes import Fault, Outcome
from ..device.sandbox import Sandbox
from ..device.standing import Job
from ..statuses import Status
from . import correctness
from .cases import Case, files_of
from .correctness import REPORT_KEYS, CaseReport
from .verdict import place

VARIANT_PROCESSES = 4  # beside the one for the task's own inputs
CORES_A_PROCESS = {True: 2, False: 4}  # on a GPU, without one: there the interpreter does the work
# The memory that a process needs in multiples of a case's inputs: contents, guarded and poisoned memory, the results
# of three calls and their copies.
INPUTS_HELD = 16
HANG_SHARE = 15  # a call's work on the GPU may take this part of the time limit of a process: 20 s of 300 s


@dataclass(frozen=True)
class Ran:
    """A case, the report of the process that ran it, and how the paths of the files begin that its calls left."""

    case: Case
    report: CaseReport | Fault
    files: str


def run(
    sandbox: Sandbox, kernel: Path, reference: Path, cases: list[Case], folder: str, timeout_s: float
) -> tuple[Outcome, list[Ran] | Fault]:
    """How the candidate's process ended, and the cases that ran, or the fault that voids them.

    The task's own cases end at the first that raises. The candidate's outputs go to `folder`. Of several processes the
    outcome is that of the first with a fault.
    """
    parts = parts_of(cases, processes_at_once(sandbox, cases))
    ended, ran = run_parts(sandbox, kernel, reference, parts, folder, timeout_s)
    if lacked_memory(ran) and (sandbox.forked_ahead.end() or len(parts) > 1):  # alone, it may have enough
        ended, ran = run_parts(sandbox, kernel, reference, [cases], folder, timeout_s)
    if isinstance(ran, Fault):
        return ended, ran
    order = {id(case): number for number, case in enumerate(cases)}
    return ended, sorted(ran, key=lambda one: order[id(one.case)])


def lacked_memory(ran: list[Ran] | Fault) -> bool:
    """Is memory what any of the cases failed for?"""
    faults = [ran] if isinstance(ran, Fault) else [one.report for one in ran if isinstance(one.report, Fault)]
    return any(fault.status == Status.OOM for fault in faults)


def run_parts(
    sandbox: Sandbox, kernel: Path, reference: Path, parts: list[list[Case]], folder: str, timeout_s: float
) -> tuple[Outcome, list[Ran] | Fault]:
    """`run` with each part of the cases in a process of its own. Outputs of a run before, in the same folder, go."""
    for left in Path(folder).glob("output-*"):
        left.unlink()
    oracle = reference.read_bytes()
    hidden = hidden_files(kernel, reference, [case for part in parts for case in part])
    paths = [f"{folder}/output-{number}" for number in range(len(parts))]
    jobs = [
        Job("run", run_arguments(kernel, part, path, hang_s=timeout_s / HANG_SHARE), timeout_s, hidden)
        for part, path in zip(parts, paths, strict=True)
    ]
    ended = standing.side_by_side(sandbox, jobs)
    if reference.read_bytes() != oracle:
        reference.write_bytes(oracle)
        message = "the kernel changed the reference while it ran; the file is restored"
        return ended[0], Fault(Status.CHEAT_SUSPECT, message)
    ran: list[Ran] = []
    for part, path, outcome in zip(parts, paths, ended, strict=True):
        reports = outcomes.failure(outcome) or reports_of(outcome.result, len(part))
        if isinstance(reports, Fault):
            return outcome, where_it_died(reports, outcome, part)
        pairs = enumerate(zip(part, reports, strict=False))
        ran += [Ran(case, report, f"{path}-{number}") for number, (case, report) in pairs]
    return ended[0], ran


def where_it_died(fault: Fault, outcome: Outcome, cases: list[Case]) -> Fault:
    """The fault of a process that ended early, with the case that it was in."""
    begun = [number for number in range(len(cases)) if f"case {number}" in outcome.marks]
    if outcome.result is not None or not begun:
        return fault
    where = place(correctness.result_of(cases[begun[-1]], fault))
    return replace(fault, message=f"{fault.message} in case {begun[-1] + 1} of {len(cases)} ({where})")


def hidden_files(kernel: Path, reference: Path, cases: list[Case]) -> list[Path | str]:
    """The files that the candidate must not open: the inputs of all cases, and the reference unless it is the kernel
    itself."""
    return files_of(cases) + ([] if kernel.samefile(reference) else [reference.resolve()])


def parts_of(cases: list[Case], at_once: int) -> list[list[Case]]:
    """The cases of each process: all of them in one, or the task's own in the first and the variants dealt out."""
    if at_once == 1:
        return [cases]
    variants = [case for case in cases if case.variant]
    dealt = [variants[number :: at_once - 1] for number in range(at_once - 1)]
    return list(filter(None, [[case for case in cases if not case.variant], *dealt]))


def processes_at_once(sandbox: Sandbox, cases: list[Case]) -> int:
    """How many processes may run side by side: 1 where they would not fit into the GPU's memory, or have few cores."""
    most = most_processes(sandbox)
    if sandbox.gpu is None:
        return most
    largest = max(case.bytes() for case in cases)
    needed = most * (INPUTS_HELD * largest + VERIFYING_BYTES)
    return most if needed < VERIFYING_SHARE * gpu.shared_bytes() else 1


def most_processes(sandbox: Sandbox) -> int:
    """How many processes this machine has the cores for."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(1 + VARIANT_PROCESSES, cores // CORES_A_PROCESS[sandbox.gpu is not None]))


def run_arguments(
    kernel: Path, cases: list[Case], path: str, hang_s: float, guarded: bool = True, trace: bool = True
) -> dict:
    """Arguments of the job `run`, whose outputs go to files that begin with `path`."""
    described = [case.for_candidate().to_json() for case in cases]
    fixed = {"kernel": str(kernel.resolve()), "path": path, "cases": described}
    return {**fixed, "hang_s": hang_s, "guarded": guarded, "trace": trace}


def reports_of(result: dict, count: int) -> list[CaseReport | Fault] | Fault:
    """The reports of up to `count` cases, if they have the form that an honest run gives them.

    Nothing in them is a verdict, but a forged report must not look like one.
    """
    done = result.get("cases")
    if not isinstance(done, list) or len(done) > count:
        return Fault(Status.RUNTIME_ERROR, "the process left no sound report")
    reports = [report_of(case) for case in done]
    if None in reports:
        return Fault(Status.RUNTIME_ERROR, "the process left no sound report")
    if len(reports) < count and not (reports and isinstance(reports[-1], Fault)):
        return Fault(Status.RUNTIME_ERROR, "the process reported on fewer cases than it was given")
    return reports


def report_of(case) -> CaseReport | Fault | None:
    """The report of one case; None where it is not sound."""
    if isinstance(case, dict) and "error" in case:
        return outcomes.fault_of(case)
    return CaseReport(**case) if isinstance(case, dict) and set(case) == REPORT_KEYS else None
