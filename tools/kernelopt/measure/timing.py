"""Time: the latency that is recorded, and the paired comparison that decides.

A latency is the median of `triton.testing.do_bench`. Two latencies taken at different times are never compared:
one and the same kernel drifts by up to 15 % within a minute. What decides are paired rounds, in which both kernels
are timed in turn in one process, in several processes (see pairing.compare).
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from ..device import gpu, outcomes
from ..device.sandbox import Outcome, Sandbox
from ..errors import Refused, TimedOut, UsageError
from ..hardware import card
from ..hardware.card import GpuState
from ..statuses import Status
from . import correctness
from .cases import Case, prepare, secret_seed
from .correctness import KernelShare
from .pairing import PairedTimes
from .verify import StoredCall, StoredCase

PROTOCOL = (
    "A B B A, then B A A B, in several processes; before each call the inputs are copied into one of two memories, the "
    "L2 "
    "cache is filled with other data (read, not written) and a sleeping kernel holds the stream; one pair of CUDA "
    "events a call; both kernels of a round get "
    "the same inputs, the rounds rotate through the sets"
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


@dataclass(frozen=True)
class Latency:
    """Single times of calls, summed up: median, 20th and 80th percentile, and their number."""

    median_us: float
    p20_us: float
    p80_us: float
    runs: int

    @classmethod
    def of(cls, times_us: list[float]) -> "Latency":
        fifths = statistics.quantiles(times_us, n=5, method="inclusive") if len(times_us) > 1 else 4 * times_us
        return cls(statistics.median(times_us), fifths[0], fifths[3], len(times_us))

    def to_json(self) -> dict:
        return {"median": self.median_us, "p20": self.p20_us, "p80": self.p80_us, "n": self.runs}

    @classmethod
    def from_json(cls, latency: dict) -> "Latency":
        return cls(latency["median"], latency["p20"], latency["p80"], latency["n"])


@dataclass(frozen=True)
class Timing:
    """The times of one workload.

    latency: of do_bench. event: between CUDA events, cache cold. gpu_us: that without the events' own time, None on a
    CPU. cupti_us: of the profiler. warm_us: GPU time with a warm cache. call_us: as a caller sees a call. graph_us:
    from a CUDA graph. kernels: None where no call was traced.
    """

    device: str
    clock: str
    workload: str
    latency: Latency
    event: Latency
    gpu_us: float | None
    cupti_us: float | None
    warm_us: float
    call_us: float
    graph_us: float | None
    kernels: list[KernelShare] | None
    warmup_ms: int
    rep_ms: int
    shapes: list[list[int]]
    dtype: str
    input_sets: int
    gpu_state: GpuState | None

    @property
    def launch_bound(self) -> bool | None:
        """Does a caller wait for launches rather than for the GPU? None without a GPU."""
        return self.call_us > LAUNCH_BOUND * self.warm_us if self.gpu_us else None

    def warnings(self) -> list[str]:
        """Warnings for a reader of these times."""
        return [*self._doubts_about_clocks(), *self._doubts_about_conditions()]

    def _doubts_about_clocks(self) -> Iterator[str]:
        if self.cupti_us and abs(self.gpu_us - self.cupti_us) > CLOCKS_SHARE * self.gpu_us + CLOCKS_US * len(
            self.kernels
        ):
            yield f"two clocks disagree: {self.cupti_us:.1f} us by CUPTI, {self.gpu_us:.1f} us by events"
        if self.kernels == []:
            yield "one clock alone: CUPTI named no kernel, so the times by events have nothing to agree with"

    def _doubts_about_conditions(self) -> Iterator[str]:
        if self.launch_bound:
            graph = f", {self.graph_us:.1f} us from a CUDA graph" if self.graph_us else ""
            yield f"launch-bound: a call takes {self.call_us:.1f} us, of which the GPU works {self.warm_us:.1f}{graph}"
        if self.gpu_state and self.gpu_state.throttle_reasons:
            yield f"the GPU was throttled: {', '.join(self.gpu_state.throttle_reasons)}"
        if self.gpu_state and self.gpu_state.foreign_processes:
            yield f"other processes use this GPU: {', '.join(map(str, self.gpu_state.foreign_processes))}"

    def to_json(self) -> dict:
        named = {JSON_NAMES.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        typed = {"latency_us": self.latency.to_json(), "event_us": self.event.to_json()}
        typed["gpu_state"] = self.gpu_state and self.gpu_state.to_json()
        typed["kernels"] = self.kernels and [kernel.to_json() for kernel in self.kernels]
        return {**named, **typed, "launch_bound": self.launch_bound, "warnings": self.warnings()}

    @classmethod
    def from_json(cls, timing: dict) -> "Timing":
        values = {field.name: timing[JSON_NAMES.get(field.name, field.name)] for field in fields(cls)}
        values["kernels"] = values["kernels"] and [KernelShare(**kernel) for kernel in values["kernels"]]
        values["gpu_state"] = values["gpu_state"] and GpuState.from_json(values["gpu_state"])
        return cls(**{**values, **{name: Latency.from_json(values[name]) for name in JSON_NAMES}})


JSON_NAMES = {"latency": "latency_us", "event": "event_us"}  # of the fields that have another name in JSON
LAUNCH_BOUND = 1.5  # a call that takes this multiple of its GPU time waits for the host
# Two clocks for the same time. On an H200 CUPTI gave 1.1 to 1.3 us less than events without their own overhead, at 30
# us and at four times that; Nsight Compute lay within 0.2 us of the latter. Events see the pause before each further
# kernel too.
CLOCKS_US = 2.0  # for each kernel
CLOCKS_SHARE = 0.05


@dataclass(frozen=True)
class TimedWorkload:
    """The measurements of one workload: its timing, the paired times of each process, and the outputs of some calls."""

    timing: Timing
    runs: list[PairedTimes]
    outputs: StoredCase


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
    prepared = prepare(sandbox, reference, dtype, workloads, seeds, timeout_s, with_variants=False, folder=folder)
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
    hidden = [case.path for sets in cases.values() for case in sets]
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
        for name, raw in one_process(sandbox, arguments, timeout_s, hidden).items():
            times[name].append(raw)
    return {name: summed_up(sandbox, name, cases[name], runs, (warmup_ms, rep_ms)) for name, runs in times.items()}


REPEATS = {True: 2, False: 1}  # on a GPU, on the CPU: of a process whose times cannot be believed


@dataclass(frozen=True)
class RawTimes:
    """The report of one process on one workload; times in microseconds, those of calls one by one.

    window: begin and end, seconds since the epoch. sets: of inputs. alone_us: of the baseline before the kernel was
    loaded. bench_us: of do_bench. empty_us: of an empty pair of events. outputs: [{set, output}] of some timed calls.
    overwritten: a later call wrote into the output of a former one. differing: calls whose result differs from the
    first on the same contents. after: {call_us, stray_us, idle_us}. gpu_state, wall_us: measured by this process."""

    clock: str
    window: list[float]
    sets: int
    a_us: list[list[float]]
    b_us: list[list[float]] | None
    alone_us: list[float]
    bench_us: list[float]
    empty_us: float
    outputs: list[dict]
    overwritten: bool
    differing: int
    gpu_state: GpuState | None
    wall_us: dict[str, float]
    after: dict[str, float] | None = None
    traced_us: list[float] | None = None
    kernels: list[dict] | None = None
    graph_us: list[float] | None = None


def one_process(sandbox: Sandbox, arguments: dict, timeout_s: float, hidden: list[str]) -> dict[str, RawTimes]:
    """The raw times of one process, by workload.

    A process whose times cannot be believed counts for nothing and is repeated: a host that stalls for some
    milliseconds looks like tampering once, a kernel that tampers does so each time."""
    on_gpu = sandbox.gpu is not None
    for repeat in range(1 + REPEATS[on_gpu]):
        with gpu.Watch() as watch:
            outcome = sandbox.run("measure", arguments, timeout_s, hidden)
        try:
            return raw_times(outcome, watch, on_gpu)
        except Unbelievable:
            if repeat == REPEATS[on_gpu]:
                raise


def raw_times(outcome: Outcome, watch: gpu.Watch, on_gpu: bool) -> dict[str, RawTimes]:
    """The worker's raw times per workload, with the state of the GPU and this process's own clock.

    KernelFailed when they cannot be believed.
    """
    result = result_of_kernel(outcome)
    try:
        times = {}
        for name, raw in result["workloads"].items():
            state = watch.state(raw["window"]) if on_gpu else None
            times[name] = RawTimes(**raw, gpu_state=state, wall_us=stretches(outcome, name))
            refuse(times[name], on_gpu)
        return times
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise KernelFailed(Status.CHEAT_SUSPECT, f"the report of the timing is not sound ({error!r})") from None


def refuse(raw: RawTimes, on_gpu: bool) -> None:
    """KernelFailed when these raw times cannot be believed, or come from calls that went wrong."""
    if suspicion := suspicious(raw, on_gpu):
        raise Unbelievable(Status.CHEAT_SUSPECT, suspicion)
    if raw.overwritten:
        raise KernelFailed(Status.ALIASED_OUTPUT, "a later call writes into the memory of a former one's output")
    if raw.differing:
        message = f"{raw.differing} timed calls returned another result than the first on the same contents"
        raise KernelFailed(Status.WRONG_VALUES, message)


def stretches(outcome: Outcome, workload: str) -> dict[str, float]:
    """{gpu, fresh, call}: microseconds a call by this process's clock, from the marks of worker.timing.PairedTiming.

    gpu: of calls launched behind a sleep, whose own length is taken off; fresh: the same, each call on other memory;
    call: as a caller sees it. Of several attempts the shortest: in the others the GPU waited for the host.
    """

    def stretch(name: str) -> tuple[float, int]:
        (begin, _), (end, calls) = (outcome.marks[f"{workload}: {name} {edge}"] for edge in ("begins", "ends"))
        return (end - begin) * 1e6, calls

    def held(name: str, attempt: int) -> float:
        took, calls = stretch(f"{name} {attempt}")
        return max(0.0, took - stretch(f"sleep {attempt}")[0]) / calls

    attempts = [at for at in range(len(outcome.marks)) if f"{workload}: sleep {at} begins" in outcome.marks]
    took, calls = stretch("call")
    if f"{workload}: restoring begins" in outcome.marks:  # of inputs that the kernel changes, beside its calls
        took = max(0.0, took - stretch("restoring")[0])
    return {name: min(held(name, at) for at in attempts) for name in ("gpu", "fresh")} | {"call": took / calls}


# How much longer than its call a kernel may keep the GPU busy, over what a library's kernel shows on the same machine.
# That took 4.4 to 7.2 us on an H200 after honest calls of 13 us to 2 ms, about 20 us on a virtual machine with busy
# cores; a kernel hidden on another stream showed 21 us (25 us of work) to 493 us (520 us of work).
STRAY_US = 10.0
STRAY_SHARE = 0.05
# {on a GPU, on the CPU}: the largest difference of two figures for the same time before the kernel is suspected of
# tampering. On an H200 kernels of 2 to 306 us took 0.5 to 0.998 of their event time by this process's clock (warm, and
# without the 1.3 us of a pair of events); a product limited by power drifts by 15 %. The CPU's clock is a busy
# machine's.
DISAGREEMENT = {True: 1.3, False: 4.0}
SLACK_US = {True: 10.0, False: 200.0}


def worked_on(call_us: float, stray_us: float, idle_us: float) -> str | None:
    """The message about a call with work outside its stream; None for any other call. Pure."""
    if stray_us - idle_us <= max(STRAY_US, STRAY_SHARE * call_us):
        return None
    return (
        f"the GPU worked on for {stray_us:.0f} us after the end of a call of {call_us:.0f} us "
        f"({idle_us:.0f} us after a kernel of torch's): the kernel runs on another stream than the current one"
    )


def suspicious(raw: RawTimes, on_gpu: bool) -> str | None:
    """The reason not to believe these raw times; None when they are plausible. Pure."""
    return next(suspicions(raw, on_gpu), None)


def suspicions(raw: RawTimes, on_gpu: bool) -> Iterator[str]:
    """Every two clocks, or two ways to call the kernel, that contradict each other."""
    factor, slack = DISAGREEMENT[on_gpu], SLACK_US[on_gpu]
    own, quick = statistics.median(flat(raw.a_us)), Latency.of(flat(raw.a_us)).p20_us
    if on_gpu and (stray := worked_on(**raw.after)):
        yield stray
    for name, where in (("gpu", "on the same memory"), ("fresh", "on memory that is new to it")):
        if (outside := raw.wall_us[name]) > factor * own + slack:
            yield f"a call {where} takes {outside:.0f} us by the clock of another process and {own:.0f} us by its own"
    if quick > factor * (bench := statistics.median(raw.bench_us)) + slack:
        yield (
            f"a call takes {bench:.0f} us in do_bench, on one and the same inputs, and {quick:.0f} us on inputs in turn"
        )
    fresh = raw.a_us[: raw.sets - 1]
    if len(fresh) > 1:
        first, again = (statistics.median(pair[at] for pair in fresh) for at in (0, 1))
        if first > factor * again + slack:
            yield (
                f"a call takes {first:.0f} us on contents that it sees for the first time and {again:.0f} us on the "
                "same contents again: it keeps results"
            )
    if raw.alone_us and Latency.of(flat(raw.b_us)).p20_us > factor * statistics.median(raw.alone_us) + slack:
        yield "the baseline became slower when the kernel was loaded"


def flat(rounds: list[list[float]]) -> list[float]:
    return [time for pair in rounds for time in pair]


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
    return TimedWorkload(timing, [PairedTimes(run.a_us, run.b_us) for run in runs], StoredCase(sets[0], calls))


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
        raise UsageError(f"what the kernel is compared with fails itself: {fault.message.strip()}")
    raise KernelFailed(fault.status, fault.message)
