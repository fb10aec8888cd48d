"""The raw times of one process, and the reasons not to believe them. Pure."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from ..device.outcomes import Outcome
from ..hardware.card import GpuState
from .latency import Latency

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


@dataclass(frozen=True)
class RawTimes:
    """The report of one process on one workload; times in microseconds, those of calls one by one.

    window: begin and end, seconds since the epoch. sets: of inputs; first_set_us: of calls on the first, before the
    rounds. alone_us: of the baseline before the kernel was loaded. bench_us: of do_bench. empty_us: of an empty pair of
    events. outputs: [{set, output}] of some timed calls. overwritten: a later call wrote into the output of a former
    one. differing: calls whose result differs from the first on the same contents. after: {call_us, stray_us, idle_us}.
    gpu_state, wall_us: measured by this process."""

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
    first_set_us: list[float]
    after: dict[str, float] | None = None
    traced_us: list[float] | None = None
    kernels: list[dict] | None = None
    graph_us: list[float] | None = None

    def on_set(self, number: int) -> list[float]:
        """The kernel's times on one set of inputs, in the order of worker.timing.PairedTiming.run_rounds. Where values
        decide how much work there is, as lengths do, sets differ."""
        own = flat([pair for at, pair in enumerate(self.a_us) if (at + 1) % self.sets == number])
        return own if number else own + self.first_set_us

    def on_timed_sets(self) -> float:
        """The mean of the medians on the sets that calls on fresh memory take in turn: those that have a round, without
        the first where there are others."""
        sets = range(1, 1 + min(len(self.a_us), self.sets - 1)) or [0]
        return statistics.fmean(statistics.median(self.on_set(number)) for number in sets)


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


def worked_on(call_us: float, stray_us: float, idle_us: float) -> str | None:
    """The message about a call with work outside its stream; None for any other call."""
    if stray_us - idle_us <= max(STRAY_US, STRAY_SHARE * call_us):
        return None
    return (
        f"the GPU worked on for {stray_us:.0f} us after the end of a call of {call_us:.0f} us "
        f"({idle_us:.0f} us after a kernel of torch's): the kernel runs on another stream than the current one"
    )


def suspicious(raw: RawTimes, on_gpu: bool) -> str | None:
    """The reason not to believe these raw times; None when they are plausible."""
    return next(suspicions(raw, on_gpu), None)


def suspicions(raw: RawTimes, on_gpu: bool) -> Iterator[str]:
    """Every two clocks, or two ways to call the kernel, that contradict each other."""
    factor, slack = DISAGREEMENT[on_gpu], SLACK_US[on_gpu]
    if on_gpu and (stray := worked_on(**raw.after)):
        yield stray
    for name, where, own in (
        ("gpu", "on the same memory", statistics.median(raw.on_set(0))),
        ("fresh", "on memory that is new to it", raw.on_timed_sets()),
    ):
        if (outside := raw.wall_us[name]) > factor * own + slack:
            yield f"a call {where} takes {outside:.0f} us by the clock of another process and {own:.0f} us by its own"
    bench, quick = statistics.median(raw.bench_us), Latency.of(raw.on_set(0)).p20_us
    if quick > factor * bench + slack:
        yield f"a call takes {bench:.0f} us in do_bench, on the same inputs, and {quick:.0f} us on inputs in turn"
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
