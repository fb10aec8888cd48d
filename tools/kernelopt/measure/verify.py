"""Is a kernel right? Inputs, candidate and oracle each in a process of its own; the verdict is made here.

1. `prepare` writes the inputs of every workload, seed and variant (cases.py) to files. Meanwhile the processes of the
   next steps are forked and start CUDA (Sandbox.forked_ahead).
2. `run` loads the candidate, and nothing of the reference, and stores its raw outputs.
3. The oracle (oracle.py), which never loads the candidate, makes the inputs anew, computes the reference in float64
   and compares.
4. At the gate, compute-sanitizer watches the memory accesses of one more run beside the others (memcheck.py).
"""

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..case_types import StoredCall
from ..device import outcomes
from ..device.outcomes import Fault, Outcome
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks
from ..session.subject import KernelUnderTest
from ..statuses import Status
from . import correctness, runs
from .cases import (
    Case,
    ReferenceFailed,
    called_up,
    draw_seeds,
    prepare_task,
    slow_in_interpreter,
    with_others,
)
from .correctness import CaseResult
from .failures import Failure
from .memcheck import Memcheck
from .oracle import Oracle
from .progress import Progress
from .verdict import (
    NO_KERNEL_NAMED,
    ProcessEnd,
    Verdict,
    bad_case,
    right,
    with_task,
    worst_error,
)


@dataclass(frozen=True)
class Judged:
    """How the candidate's process ended, and a result a case, or the fault that leaves none. left_out: names of
    variants on which the reference itself fails."""

    outcome: Outcome
    results: list[CaseResult]
    fault: Fault | None = None
    left_out: tuple[str, ...] = ()


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
    watches a run, where it is installed. say: gets a line before each step that takes its time, and every 20 s.
    Stopped says how far it came. UsageError when a workload is unknown; whatever the candidate does is a status."""
    memcheck = Memcheck(sandbox, target.kernel, target.reference, timeout_s) if sanitize else None
    with (
        sandbox.folder("verify") as folder,
        Progress(sandbox, say) as progress,
        memcheck or contextlib.nullcontext(),
    ):
        variants = not target.only_these_shapes
        drawn = draw_seeds(max(2, seeds))
        others = variants and runs.most_processes(sandbox) - 1
        sandbox.forked_ahead.get_ready("prepare", "run", "check", *["run"] * others)
        try:
            task = prepare_task(sandbox, target.reference, target.dtype, workloads, drawn, timeout_s, variants, folder)
        except ReferenceFailed as error:
            return verdict(sandbox, target, [], error.fault)
        cases = with_others(task.cases)
        usual = [case for case in cases if not case.in_reserve]
        say(f"on {len(usual)} cases: seeds" + ", other sizes, layouts and values" * variants)
        if sandbox.gpu is None and (warning := slow_in_interpreter(usual)):
            say(warning)
        judged = judge(sandbox, target, cases, folder, timeout_s, progress, memcheck)
        result = verdict(sandbox, target, judged.results, judged.fault, judged.outcome)
        result = with_task(result, task.declared, [*task.left_out, *judged.left_out], task.fixed)
        return memcheck.judged(result) if memcheck and result.status == Status.OK else result


def judge(
    sandbox: Sandbox,
    target: KernelUnderTest,
    cases: list[Case],
    folder: str,
    timeout_s: float,
    progress: Progress,
    memcheck: Memcheck | None = None,
) -> Judged:
    """Run the candidate on the cases, on those in reserve only where it declines others, and judge its outputs, which
    go to `folder`. The run under memcheck goes on beside; all runs are over before anything is judged, so that no
    process can change an output."""
    began = time.monotonic()
    usual = [case for case in cases if not case.in_reserve]
    progress.begin("run", len(usual))
    if memcheck:
        memcheck.begin(usual)
    outcome, ran = run_beside(memcheck, sandbox, target.kernel, target.reference, usual, folder, timeout_s)
    if not isinstance(ran, Fault) and (reserve := called_up(cases, declined(ran))):
        progress.say(f"on {len(reserve)} more, at {sizes_of(reserve)}, since it declines others")
        progress.begin("run", len(reserve))
        apart = tempfile.mkdtemp(prefix="reserve-", dir=folder)
        outcome, more = run_beside(memcheck, sandbox, target.kernel, target.reference, reserve, apart, timeout_s)
        ran = more if isinstance(more, Fault) else ran + more
    if isinstance(ran, Fault):
        return Judged(outcome, [], ran)
    if memcheck:
        progress.begin("memcheck", len(usual))
        memcheck.wait(time.monotonic() - began)
    return checked(sandbox, target, outcome, ran, timeout_s, progress)


def declined(ran: list[runs.Ran]) -> set[str]:
    """The names of the variants that the kernel declined."""
    raised = [(one.case.variant, one.report) for one in ran if one.case.variant and isinstance(one.report, Fault)]
    return {variant.name for variant, fault in raised if correctness.is_declined(fault, variant)}


def sizes_of(reserve: list[Case]) -> str:
    """At which sizes these cases in reserve are, which are all of one task."""
    return "halved sizes" if any(case.variant.keywords for case in reserve) else "the task's own sizes"


def checked(
    sandbox: Sandbox,
    target: KernelUnderTest,
    outcome: Outcome,
    ran: list[runs.Ran],
    timeout_s: float,
    progress: Progress,
) -> Judged:
    """What the oracle finds in the outputs of the candidate's runs."""
    left = [one for one in ran if not isinstance(one.report, Fault)]
    progress.begin("check", len(left))
    stored = [one.case.for_oracle(stored_calls(one), stored_draws(one)) for one in left]
    try:
        checks = iter(Oracle.of(sandbox, target, timeout_s).check(stored))
    except ReferenceFailed as error:
        return Judged(outcome, [], error.fault)
    of_case = [(one.case, one.report, None if isinstance(one.report, Fault) else next(checks)) for one in ran]
    left_out = tuple(case.variant.name for case, _, found in of_case if found and found.broken)
    results = [correctness.judge(*one, target.libraries) for one in of_case if not (one[2] and one[2].broken)]
    return Judged(outcome, results, left_out=left_out)


def run_beside(memcheck: Memcheck | None, *arguments) -> tuple[Outcome, list[runs.Ran] | Fault]:
    """runs.run with these arguments. A kernel may hang under compute-sanitizer alone, and hold up what runs beside it.
    What times out beside it is run once more without it."""
    outcome, ran = runs.run(*arguments)
    is_late = isinstance(ran, Fault) and ran.status == Status.TIMEOUT
    if not (is_late and memcheck and memcheck.is_running()):
        return outcome, ran
    memcheck.give_up("given up: a run beside it timed out, and was made again without it")
    return runs.run(*arguments)


def stored_calls(ran: runs.Ran) -> list[StoredCall]:
    """The files that the calls on a case left. The third call leaves one only if it differs from the first, whose
    contents it got."""
    case = ran.case
    seeds = [case.seed, case.other.seed, case.seed] if case.other else [case.seed]
    files = [Path(f"{ran.files}-{call}.pt") for call in range(len(seeds))]
    needed = files[:2]
    return [
        StoredCall(seed, str(file)) for seed, file in zip(seeds, files, strict=True) if file in needed or file.exists()
    ]


def stored_draws(ran: runs.Ran) -> str | None:
    """The file of what the kernel drew over secret seeds."""
    return f"{ran.files}-draws.pt" if ran.case.draws else None


def check_profiler(sandbox: Sandbox, timeout_s: float) -> None:
    """EnvironmentLacks when torch's profiler names no kernel in a process that runs nothing of a candidate's."""
    outcome = sandbox.run("probe", {}, timeout_s)
    if outcomes.failure(outcome) or not outcome.result["kernels"]:
        raise EnvironmentLacks(
            f"own work cannot be checked here: {NO_KERNEL_NAMED.replace('a call', 'torch itself')}; nothing is recorded"
        )


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
    if fault:
        in_triton = target.kernel.is_file() and b"triton" in target.kernel.read_bytes()
        summary = Failure(fault, device, bad, tuple(results), in_triton).summary()
    else:
        summary = right(device, results, own_work)
    return Verdict(
        status=fault.status if fault else Status.OK,
        device=device,
        summary=summary,
        worst_rel_err=worst_error(results),
        tolerance=target.tolerance or "by dtype",
        own_work=own_work,
        sandbox=sandbox.isolation,
        cases=tuple(results),
        process=outcome and ProcessEnd(outcome.exit_code, outcome.signal, outcome.wall_s, outcome.log_tail),
    )
