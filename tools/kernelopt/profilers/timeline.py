"""When the GPU and the host work during some calls: stages, gaps, overlap, cost of the CUDA API. Pure functions.

torch_trace.py and nsys.py read a `Trace`; `analyse` makes a `Timeline` of it. Copies and fills count as kernels.
"""

import dataclasses
import statistics
from collections import defaultdict
from dataclasses import dataclass

from ..errors import Refused
from ..intervals import busy_us, span_us

GAP_US = 1.0  # a shorter pause between two kernels is not listed


@dataclass(frozen=True)
class Launch:
    """A kernel, a copy or a fill on the GPU. grid, block: three sizes; None where the profiler does not report them."""

    name: str
    start_us: float
    us: float
    stream: int | str | None = None
    grid: list[int] | None = None
    block: list[int] | None = None
    registers: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True)
class HostEvent:
    """A call of the CUDA API, or a marked call of the kernel."""

    name: str
    start_us: float
    us: float


@dataclass(frozen=True)
class Trace:
    """What a profiler recorded. source: its name. calls: the marked calls; empty without marks."""

    source: str
    launches: tuple[Launch, ...]
    api: tuple[HostEvent, ...] = ()
    calls: tuple[HostEvent, ...] = ()


@dataclass(frozen=True)
class Stage:
    """All launches of one kernel in a call. us: their total, the median over the calls. share_pct: of all GPU time."""

    name: str
    launches: float
    us: float
    share_pct: float | None
    stream: int | str | None
    grid: list[int] | None
    block: list[int] | None
    registers: int | None
    shared_bytes: int | None


@dataclass(frozen=True)
class Gap:
    """The pause between the end of one kernel and the start of the next, the median over the calls."""

    after: str
    before: str
    us: float


@dataclass(frozen=True)
class ApiCost:
    """A function of the CUDA API: how often and how long the host calls it in one call of the kernel, on average."""

    name: str
    count: float
    us: float


@dataclass(frozen=True)
class Timeline:
    """Medians over the calls. span_us: from the start of the first kernel to the end of the last. busy_us: at least
    one kernel runs. overlap_us: at least two run."""

    calls: int
    stages: tuple[Stage, ...]
    span_us: float
    busy_us: float
    idle_pct: float | None
    overlap_us: float
    streams: int
    gaps: tuple[Gap, ...]
    api: tuple[ApiCost, ...]

    def to_json(self) -> dict:
        return dataclasses.asdict(self)


def analyse(trace: Trace) -> Timeline:
    """Refused when the trace holds no kernel."""
    calls = per_call(trace)
    if not calls:
        raise Refused("the timeline holds no kernel: does the call launch one?")
    spans = [span_us(times(launches)) for launches in calls]
    busy = [busy_us(times(launches)) for launches in calls]
    overlap = [max(0.0, sum(k.us for k in launches) - b) for launches, b in zip(calls, busy, strict=True)]
    return Timeline(
        calls=len(calls),
        stages=stages(calls),
        span_us=statistics.median(spans),
        busy_us=statistics.median(busy),
        idle_pct=100 * (1 - sum(busy) / sum(spans)) if sum(spans) else None,
        overlap_us=statistics.median(overlap),
        streams=len({launch.stream for launches in calls for launch in launches}),
        gaps=gaps(calls),
        api=api_cost(trace, len(calls)),
    )


def times(launches: list[Launch]) -> list[tuple[float, float]]:
    return [(launch.start_us, launch.us) for launch in launches]


def per_call(trace: Trace) -> list[list[Launch]]:
    """The launches of each call, in the order of their start; one list where the calls were not marked."""
    launches = sorted(trace.launches, key=lambda launch: launch.start_us)
    starts = sorted(call.start_us for call in trace.calls) or [float("-inf")]
    ends = [*starts[1:], float("inf")]
    calls = [[k for k in launches if start <= k.start_us < end] for start, end in zip(starts, ends, strict=True)]
    return [launches for launches in calls if launches]


def stages(calls: list[list[Launch]]) -> tuple[Stage, ...]:
    """The stages in launch order."""
    names = dict.fromkeys(launch.name for launches in calls for launch in launches)
    total = sum(launch.us for launches in calls for launch in launches)
    return tuple(
        stage([[launch for launch in launches if launch.name == name] for launches in calls], total) for name in names
    )


def stage(calls: list[list[Launch]], total_us: float) -> Stage:
    """The launches of one kernel, by call. total_us: of all kernels in all calls."""
    first = next(launch for launches in calls for launch in launches)
    times_us = [sum(launch.us for launch in launches) for launches in calls]
    return Stage(
        name=first.name,
        launches=statistics.median(map(len, calls)),
        us=statistics.median(times_us),
        share_pct=100 * sum(times_us) / total_us if total_us else None,
        stream=first.stream,
        grid=first.grid,
        block=first.block,
        registers=first.registers,
        shared_bytes=first.shared_bytes,
    )


def gaps(calls: list[list[Launch]]) -> tuple[Gap, ...]:
    """The pauses of GAP_US and more, longest first."""
    pauses: dict[tuple[str, str], list[float]] = defaultdict(list)
    for launches in calls:
        end, last = float("-inf"), None
        for launch in launches:
            if last is not None:
                pauses[last, launch.name].append(launch.start_us - end)
            if launch.start_us + launch.us > end:
                end, last = launch.start_us + launch.us, launch.name
    medians = [Gap(after, before, statistics.median(us)) for (after, before), us in pauses.items()]
    return tuple(sorted((gap for gap in medians if gap.us >= GAP_US), key=lambda gap: -gap.us))


def api_cost(trace: Trace, calls: int) -> tuple[ApiCost, ...]:
    """The cost of the host's calls of the CUDA API, the most expensive first. Calls between the kernel's calls do not
    count, because there the profiler waits for the GPU."""
    durations: dict[str, list[float]] = defaultdict(list)
    inside = [(call.start_us, call.start_us + call.us) for call in trace.calls]
    for event in trace.api:
        if not inside or any(start <= event.start_us < end for start, end in inside):
            durations[event.name].append(event.us)
    costs = [ApiCost(name, len(us) / calls, sum(us) / calls) for name, us in durations.items()]
    return tuple(sorted(costs, key=lambda cost: -cost.us))
