"""Time: the latency that is recorded, and the paired comparison that decides.

A latency is the median of `triton.testing.do_bench`. Two latencies taken at different times are never compared:
one and the same kernel drifts by up to 15 % within a minute. What decides are paired rounds, in which both kernels
are timed in turn in one process, in several processes (see pairing.compare).
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from ..case_types import StoredCall, StoredCase
from ..device import gpu_watch, outcomes
from ..device.outcomes import Outcome
from ..device.sandbox import Sandbox
from ..errors import Refused, TimedOut, UsageError
from ..hardware import card
from ..statuses import Status
from . import correctness
from .cases import Case, files_of, prepare, secret_seed
from .latency import Latency, Timing
from .pairing import PairedTimes
from .raw_times import RawTimes, flat, stretches, suspicious

PROTOCOL = (
    "A B B A, then B A A B, in several processes; before each call the inputs are copied into one of two memories, the "
    "L2 cache is filled with other data (read, not written) and a sleeping kernel holds the stream; one pair of CUDA "
    "events a call; both kernels of a round get the same inputs, the rounds rotate through the sets"
)
WARMUP_MS = 25  # do_bench's own defaults: both are milliseconds, not counts
REP_MS = 100
# The counts are fixed, so that no run stops at a lucky moment: 240 rounds in each of 3 processes and, where that stays
# ambiguous, 960. With 60, an H200 distinguished a kernel of 32 us that does 1 % more work in 84 of 100 comparisons,
# with 240 in 50 of 50; no kernel was judged faster or slower than itself in 260.
ROUNDS = (240, 960)
PROCESSES = 3
CPU_ROUNDS = (12, 12)
BUDGET_S = (1.5, 6.0)  # of rounds in one process and workload: slow kernels get fewer rounds, and need fewer
INPUT_SETS = 8
SETS_BYTES = 1 << 30  # of their files; a kernel that keeps results is seen with three sets, and larger inputs get two
REPEATS = {True: 2, False: 1}  # on a GPU, on the CPU: of a process whose times cannot be believed


@dataclass(frozen=True)
class TimedWorkload:
    """The measurements of one workload: its timing, the paired times of each process, and the outputs of some calls."""

    timing: Timing
    runs: list[PairedTimes]
    outputs: StoredCase


def get_ready(sandbox: Sandbox, is_paired: bool, *jobs: str) -> None:
    """Have the processes of a timing started while its inputs are made. jobs: that come after it, besides `check`."""
    sandbox.forked_ahead.get_ready("prepare", *["measure"] * (PROCESSES if is_paired else 1), "check", *jobs)


def inputs(
    sandbox: Sandbox,
    reference: Path,
    dtype: str | None,
    workloads: list[str],
    timeout_s: float = 300,
    count: int = INPUT_SETS,
) -> dict[str, list[Case]]:
    """Per workload, files with `count` sets of fresh random inputs; fewer when they are large. Where seeds give other
    sizes, a set of middle size comes first: its time stands for all."""
    seeds = [secret_seed() for _ in range(count)]
    folder = sandbox.new_folder("inputs")
    prepared = prepare(
        sandbox,
        reference,
        dtype,
        workloads,
        seeds,
        timeout_s,
        with_variants=False,
        folder=folder,
        limit_bytes=SETS_BYTES,
    )
    return {name: middle_first([case for case in prepared if case.workload == name]) for name in workloads}


def middle_first(sets: list[Case]) -> list[Case]:
    """The sets with one of middle size in front; as they are where all have the same size."""
    by_size = sorted(range(len(sets)), key=lambda number: sum(map(math.prod, sets[number].shapes)))
    middle = by_size[(len(by_size) - 1) // 2]
    if sets[middle].shapes == sets[0].shapes:
        return sets
    return [sets[middle], *sets[:middle], *sets[middle + 1 :]]


def measure(
    sandbox: Sandbox,
    kernel: Path,
    baseline: Path | None,
    cases: dict[str, list[Case]],
    attempt: int = 0,
    warmup_ms: int = WARMUP_MS,
    rep_ms: int = REP_MS,
    timeout_s: float = 300,
) -> dict[str, TimedWorkload]:
    """Time the kernel on each workload.

    baseline: timed in turn with the kernel, in PROCESSES processes; without one, one process times the kernel alone.
    attempt: 0 or 1, the second with more rounds. Refused when the kernel cannot be run, or tampers with its timing.
    """
    rounds = (ROUNDS if sandbox.gpu else CPU_ROUNDS)[attempt]
    processes = PROCESSES if baseline and sandbox.gpu else 1
    hidden = files_of(case for sets in cases.values() for case in sets)
    compares = any(case.compares for sets in cases.values() for case in sets)
    times: dict[str, list[RawTimes]] = {name: [] for name in cases}
    for number in range(processes):
        arguments = {
            "kernel": str(kernel.resolve()),
            "baseline": baseline and str(baseline.resolve()),
            "workloads": {name: [case.path for case in sets] for name, sets in cases.items()},
            "rounds": rounds,
            "budget_s": BUDGET_S[attempt],
            "warmup_ms": warmup_ms,
            "rep_ms": rep_ms,
            "trace": number == 0 and attempt == 0,
            "folder": sandbox.new_folder("timed"),
        }
        for name, raw in one_process(sandbox, arguments, timeout_s, hidden, compares).items():
            times[name].append(raw)
    return {name: summed_up(sandbox, name, cases[name], runs, (warmup_ms, rep_ms)) for name, runs in times.items()}


def one_process(
    sandbox: Sandbox, arguments: dict, timeout_s: float, hidden: list[str], compares: bool = False
) -> dict[str, RawTimes]:
    """The raw times of one process, by workload.

    A process whose times cannot be believed counts for nothing and is repeated: a host that stalls for some
    milliseconds looks like tampering once, a kernel that tampers does so each time."""
    on_gpu = sandbox.gpu is not None
    for repeat in range(1 + REPEATS[on_gpu]):
        own = sandbox.forked_ahead.until_ready("measure")  # the start of a process would disturb the times
        with gpu_watch.Watch(own) as watch:
            outcome = sandbox.run("measure", arguments, timeout_s, hidden)
        try:
            return believed_times(outcome, watch, on_gpu, compares)
        except Unbelievable:
            if repeat == REPEATS[on_gpu]:
                raise


def believed_times(outcome: Outcome, watch: gpu_watch.Watch, on_gpu: bool, compares: bool) -> dict[str, RawTimes]:
    """The worker's raw times per workload, with the state of the GPU and this process's own clock.

    KernelFailed when they cannot be believed.
    """
    result = result_of_kernel(outcome)
    try:
        times = {}
        for name, raw in result["workloads"].items():
            state = watch.state(raw["window"]) if on_gpu else None
            times[name] = RawTimes(**raw, gpu_state=state, wall_us=stretches(outcome, name))
            refuse(times[name], on_gpu, compares)
        return times
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise KernelFailed(Status.CHEAT_SUSPECT, f"the report of the timing is not sound ({error!r})") from None


def refuse(raw: RawTimes, on_gpu: bool, compares: bool = False) -> None:
    """KernelFailed when these raw times cannot be believed, or come from calls that went wrong.

    compares: the task declares how outputs are compared, so that one result may differ from another and both be right;
    Oracle.fault_of_timed judges some of those."""
    if suspicion := suspicious(raw, on_gpu):
        raise Unbelievable(Status.CHEAT_SUSPECT, suspicion)
    if raw.overwritten:
        raise KernelFailed(Status.ALIASED_OUTPUT, "a later call writes into the memory of a former one's output")
    if raw.differing and not compares:
        message = f"{raw.differing} timed calls returned another result than the first on the same contents"
        raise KernelFailed(Status.WRONG_VALUES, message)


def summed_up(
    sandbox: Sandbox, workload: str, sets: list[Case], runs: list[RawTimes], window_ms: tuple[int, int]
) -> TimedWorkload:
    """The timing of one workload from the raw times of all processes. The first process alone traces the kernels."""
    first, event = runs[0], Latency.of([time for run in runs for time in flat(run.a_us)])
    timing = Timing(
        device=sandbox.device_name,
        clock=first.clock,
        workload=workload,
        latency=Latency.of(first.bench_us),
        event=event,
        gpu_us=event.median_us - statistics.median(run.empty_us for run in runs) if sandbox.gpu else None,
        cupti_us=statistics.median(first.traced_us) if first.kernels else None,
        warm_us=statistics.median(run.wall_us["gpu"] for run in runs),
        call_us=statistics.median(run.wall_us["call"] for run in runs),
        graph_us=statistics.median(first.graph_us) if first.graph_us else None,
        kernels=correctness.shares(first.kernels) if first.kernels is not None else None,
        warmup_ms=window_ms[0],
        rep_ms=window_ms[1],
        shapes=sets[0].shapes,
        dtype=sets[0].dtype,
        input_sets=len(sets),
        gpu_state=card.merged(run.gpu_state for run in runs),
    )
    calls = [StoredCall(sets[one["set"]].seed, one["output"]) for run in runs for one in run.outputs]
    return TimedWorkload(timing, [PairedTimes(run.a_us, run.b_us) for run in runs], sets[0].for_oracle(calls))


class KernelFailed(Refused):
    """The kernel failed while it was timed; `status` says how."""

    def __init__(self, status: Status, message: str):
        super().__init__(f"{status}: {message.strip()}; its time does not count, run verify_kernel.py first")
        self.status = status


class Unbelievable(KernelFailed):
    """Its times contradict each other."""


def result_of_kernel(outcome: Outcome) -> dict:
    """The worker's result; Raises KernelFailed, TimedOut or UsageError when the kernel or its baseline failed."""
    fault = outcomes.failure(outcome)
    if fault is None:
        return outcome.result
    if fault.status == Status.TIMEOUT:
        raise TimedOut(f"the kernel did not finish: {fault.message}; --timeout raises the limit")
    if fault.status == Status.BASELINE_ERROR:
        raise UsageError(f"the kernel that it is compared with fails: {fault.message.strip()}")
    raise KernelFailed(fault.status, fault.message)
