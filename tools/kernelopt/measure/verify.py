"""Is a kernel right? Inputs, candidate and oracle each in a process of its own; the verdict is made here.

1. `prepare` writes the inputs of every workload, seed and variant (cases.py) to files.
2. `run` loads the candidate, and nothing of the reference, and stores its raw outputs.
3. `check`, which never loads the candidate, makes the inputs anew, computes the reference in float64 and compares.
4. At the gate, compute-sanitizer watches the memory accesses of one more run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..device import outcomes, programs
from ..device.outcomes import Fault
from ..device.sandbox import Outcome, Sandbox
from ..errors import EnvironmentLacks
from ..session.target import KernelUnderTest
from ..statuses import Status
from . import correctness
from .cases import Case, ReferenceFailed, called_up, draw_seeds, prepare, result_of_reference, with_others
from .correctness import REPORT_KEYS, CaseReport, CaseResult, OracleCheck
from .verdict import HINTS, NO_KERNEL_NAMED, Failure, ProcessEnd, SanitizerRun, Verdict, bad_case, right, worst_error

# Bound on |error| / (|reference| + rms(reference)), by the dtype of the output. bf16 and fp16: two units in
# the last place (bf16 equals torch.testing's rtol); fp32: KernelBench's 1e-4, which a tf32 product fails;
# fp64: torch.testing; fp8: one unit of e4m3; integers and bool: equal.
TOLERANCES = {"fp64": 1e-7, "fp32": 1e-4, "fp16": 2e-3, "bf16": 1.6e-2, "fp8": 0.125, "exact": 0.0}
# The interpreter truncates fp32 to bf16 where the GPU rounds: up to one more unit in the last place.
INTERPRETER_TOLERANCES = {**TOLERANCES, "bf16": 2.4e-2}
SANITIZED_BYTES = 256 << 20  # of inputs: compute-sanitizer slows a kernel down by a factor of some tens
SANITIZER_ERRORS = 86  # the exit code by which compute-sanitizer says that it reports errors


@dataclass(frozen=True)
class StoredCall:
    """The file of outputs that one call left, and the seed of the inputs that it got."""

    inputs_seed: int
    output: str


@dataclass(frozen=True)
class StoredCase:
    """A case and the files that the candidate's calls on it left."""

    case: Case
    calls: list[StoredCall]

    def to_json(self) -> dict:
        return {**self.case.for_oracle(), "calls": [vars(call) for call in self.calls]}


@dataclass(frozen=True)
class Judged:
    """How the candidate's process ended, and a result a case, or the fault that leaves none."""

    outcome: Outcome
    results: list[CaseResult]
    fault: Fault | None = None


def verify(
    sandbox: Sandbox,
    target: KernelUnderTest,
    workloads: list[str] | None = None,
    seeds: int = 3,
    sanitize: bool = False,
    timeout_s: float = 300,
    say: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """The kernel against the reference on every workload, seed and variant.

    workloads: None for all. seeds: how many, at least two; the last ones are secret. sanitize: compute-sanitizer
    watches a run, where it is installed. say: gets a line before each step that takes its time. UsageError when a
    workload is unknown; whatever the candidate does is a status."""
    with sandbox.folder("verify") as folder:
        variants = not target.only_these_shapes
        drawn = draw_seeds(max(2, seeds))
        try:
            prepared = prepare(sandbox, target.reference, target.dtype, workloads, drawn, timeout_s, variants, folder)
        except ReferenceFailed as error:
            return verdict(sandbox, target, [], error.fault)
        prepared = with_others(prepared)
        usual = [case for case in prepared if not case.in_reserve]
        say(f"on {len(usual)} cases: seeds" + ", other sizes, layouts and values" * variants)
        judged = judge(sandbox, target, usual, folder, timeout_s)
        declined = {result.variant for result in judged.results if result.status == Status.DECLINED}
        if rest := called_up(prepared, declined):
            say(f"on {len(rest)} more, at the task's own sizes, since it declines others")
            with sandbox.folder("outputs") as apart:
                more = judge(sandbox, target, rest, apart, timeout_s)
            judged = Judged(more.outcome, [] if more.fault else judged.results + more.results, more.fault)
        result = verdict(sandbox, target, judged.results, judged.fault, judged.outcome)
        if sanitize and result.status == Status.OK:
            say("under compute-sanitizer")
            result = sanitized(sandbox, target.kernel, usual, result, timeout_s)
        return result


def judge(sandbox: Sandbox, target: KernelUnderTest, cases: list[Case], folder: str, timeout_s: float) -> Judged:
    """Run the candidate on the cases and judge its outputs, which go to `folder`."""
    outcome, reports = run(sandbox, target.kernel, target.reference, cases, folder, timeout_s)
    if isinstance(reports, Fault):
        return Judged(outcome, [], reports)
    pairs = list(zip(cases, reports, strict=False))  # it stops at the first case that raises
    stored = [
        StoredCase(case, stored_calls(case, folder, number))
        for number, (case, report) in enumerate(pairs)
        if not isinstance(report, Fault)
    ]
    try:
        checks = iter(check(sandbox, target.reference, target.dtype, stored, target.tolerance, timeout_s))
    except ReferenceFailed as error:
        return Judged(outcome, [], error.fault)
    results = [
        correctness.judge(case, report, None if isinstance(report, Fault) else next(checks), target.libraries)
        for case, report in pairs
    ]
    return Judged(outcome, results)


def run(
    sandbox: Sandbox, kernel: Path, reference: Path, cases: list[Case], folder: str, timeout_s: float
) -> tuple[Outcome, list[CaseReport | Fault] | Fault]:
    """How the candidate's process ended, and its report on each case, or the fault that voids them.

    Its outputs go to `folder`.
    """
    oracle = reference.read_bytes()
    hidden = [case.path for case in cases] + ([] if kernel.samefile(reference) else [reference.resolve()])
    outcome = sandbox.run("run", run_arguments(kernel, cases, folder), timeout_s, hidden)
    if reference.read_bytes() != oracle:
        reference.write_bytes(oracle)
        message = "the kernel changed the reference while it ran; the file is restored"
        return outcome, Fault(Status.CHEAT_SUSPECT, message)
    return outcome, outcomes.failure(outcome) or reports_of(outcome.result, len(cases))


def run_arguments(kernel: Path, cases: list[Case], folder: str, guarded: bool = True, trace: bool = True) -> dict:
    """Arguments of the job `run`, whose outputs go to `folder`."""
    path = {"kernel": str(kernel.resolve()), "path": f"{folder}/output"}
    return {**path, "cases": [case.for_candidate() for case in cases], "guarded": guarded, "trace": trace}


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


def stored_calls(case: Case, folder: str, number: int) -> list[StoredCall]:
    """The files that the calls on a case left. The third call leaves one only if it differs from the first, whose
    contents it got."""
    seeds = [case.seed, case.other.seed, case.seed] if case.other else [case.seed]
    files = [Path(folder) / f"output-{number}-{call}.pt" for call in range(len(seeds))]
    needed = files[:2]
    return [
        StoredCall(seed, str(file)) for seed, file in zip(seeds, files, strict=True) if file in needed or file.exists()
    ]


def sanitized(sandbox: Sandbox, kernel: Path, cases: list[Case], result: Verdict, timeout_s: float) -> Verdict:
    """The verdict after compute-sanitizer's memcheck has watched one run of the kernel.

    `sanitizer` holds its report, or the reason why it did not run. The summary repeats that reason.
    """
    small = [case for case in cases if Path(case.path).stat().st_size <= SANITIZED_BYTES]
    program = programs.find("compute-sanitizer")
    obstacles = {
        "there is no GPU": sandbox.gpu is None,
        "it is neither on the PATH nor in the CUDA toolkit": program is None,
        "all inputs are too large for it": not small,
    }
    if reasons := [reason for reason, holds in obstacles.items() if holds]:
        return not_sanitized(result, reasons[0])
    arguments = run_arguments(kernel, small[:1], sandbox.new_folder("outputs"), guarded=False, trace=False)
    tool = [program, "--tool", "memcheck", "--show-backtrace", "no", "--print-limit", "1"]
    tool += ["--error-exitcode", str(SANITIZER_ERRORS)]
    # Every tensor gets an allocation of its own, or an access out of bounds would hit its neighbour in torch's pool.
    outcome = sandbox.run_under(tool, "run", arguments, timeout_s, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    lines = [line.removeprefix("=========").strip() for line in outcome.log_tail.splitlines()]
    if outcome.exit_code == SANITIZER_ERRORS:
        return out_of_bounds(result, lines, outcome.log_tail)
    if any(line.startswith("ERROR SUMMARY") for line in lines):
        return replace(result, sanitizer=SanitizerRun(errors=0))
    last = next(filter(None, reversed(lines)), "it said nothing")
    return not_sanitized(result, f"time-out after {timeout_s:.0f} s" if outcome.timed_out else last)


def out_of_bounds(result: Verdict, lines: list[str], log_tail: str) -> Verdict:
    """The verdict on a kernel of which compute-sanitizer reports errors, in these lines."""
    first = next((line for line in lines if line.startswith(("Invalid", "Program hit"))), "see the log")
    status = Status.OUT_OF_BOUNDS
    return replace(
        result,
        status=status,
        summary=f"{status}: compute-sanitizer: {first}; {HINTS[status]}",
        process=replace(result.process, log_tail=log_tail),
        sanitizer=SanitizerRun(errors="at least 1"),
    )


def not_sanitized(result: Verdict, why: str) -> Verdict:
    """The verdict, which says why compute-sanitizer did not watch the kernel's memory accesses."""
    summary = f"{result.summary}; compute-sanitizer did not run: {why[:120]}"
    return replace(result, summary=summary, sanitizer=SanitizerRun(why_not=why))


def check_profiler(sandbox: Sandbox, timeout_s: float) -> None:
    """EnvironmentLacks when torch's profiler names no kernel in a process that runs nothing of a candidate's."""
    outcome = sandbox.run("probe", {}, timeout_s)
    if outcomes.failure(outcome) or not outcome.result["kernels"]:
        raise EnvironmentLacks(
            f"own work cannot be checked here: {NO_KERNEL_NAMED.replace('a call', 'torch itself')}; nothing is recorded"
        )


def tolerances(device: str, tolerance: float | None) -> dict[str, float]:
    """The bound on the error of an output, by its dtype; `tolerance` replaces all that are not exact."""
    table = TOLERANCES if device == "cuda" else INTERPRETER_TOLERANCES
    if tolerance is not None:
        table = {name: tolerance if name != "exact" else 0.0 for name in table}
    return table


def check(
    sandbox: Sandbox,
    reference: Path,
    dtype: str | None,
    stored: list[StoredCase],
    tolerance: float | None,
    timeout_s: float,
) -> list[OracleCheck]:
    """The findings of the worker's `check` on each case. Raises as `cases.result_of_reference` does."""
    if not stored:
        return []
    arguments = {
        "reference": str(reference.resolve()),
        "dtype": dtype,
        "cases": [case.to_json() for case in stored],
        "tolerances": tolerances(sandbox.device, tolerance),
    }
    checked = result_of_reference(sandbox.run("check", arguments, timeout_s))
    return list(map(OracleCheck.from_json, checked["cases"]))


def check_timed(
    sandbox: Sandbox,
    reference: Path,
    dtype: str | None,
    timed: list[StoredCase],
    tolerance: float | None,
    timeout_s: float,
) -> Fault | None:
    """The faults in the outputs that timed calls left. A kernel may be right only when verified."""
    by_seed = [StoredCase(stored.case, sorted(stored.calls, key=lambda call: call.inputs_seed)) for stored in timed]
    try:
        checks = check(sandbox, reference, dtype, by_seed, tolerance, timeout_s)
    except ReferenceFailed as error:
        return error.fault
    for stored, checked in zip(by_seed, checks, strict=True):
        if fault := next(correctness.faults_of_outputs(checked), None):
            message = f"wrong when timed (workload {stored.case.workload}): {fault.message}"
            return Fault(fault.status, message)
    return None


def verdict(
    sandbox: Sandbox,
    target: KernelUnderTest,
    results: list[CaseResult],
    fault: Fault | None,
    outcome: Outcome | None = None,
) -> Verdict:
    """The verdict on a kernel: the fault, else the first bad case's status, else OK when there are cases."""
    own_work = correctness.own_work(results, target.libraries)
    bad = bad_case(results)
    if bad:
        fault = Fault(bad.status, bad.message)
    elif not results and fault is None:
        fault = Fault(Status.INTERNAL, "nothing was checked")
    device = sandbox.device_name
    return Verdict(
        status=fault.status if fault else Status.OK,
        device=device,
        summary=Failure(fault, device, bad).summary() if fault else right(device, results, own_work),
        worst_rel_err=worst_error(results),
        tolerance=target.tolerance or "by dtype",
        own_work=own_work,
        sandbox=sandbox.isolation,
        cases=tuple(results),
        process=outcome and ProcessEnd(outcome.exit_code, outcome.signal, outcome.wall_s, outcome.log_tail),
    )
