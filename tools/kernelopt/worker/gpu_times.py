"""What a GPU alone tells of a call: work after its end, the times of its kernels, its time in a CUDA graph.

Imported by worker processes only.
"""

from dataclasses import dataclass
from time import perf_counter

import torch

from .. import intervals
from . import tracing
from .timers import GatedTimer

TRACED_CALLS = 9
STRAY_CALLS = 9
GRAPH_REPLAYS = 30


@dataclass(frozen=True)
class AfterTheCall:
    """How long a call takes on its stream, how long the GPU works after that, and how long the host takes to see an
    idle GPU after a kernel of torch, in microseconds."""

    call_us: float
    stray_us: float
    idle_us: float


@dataclass(frozen=True)
class TracedCalls:
    """traced_us: of each traced call, the run time of its kernels. kernels: of one such call."""

    traced_us: list[float]
    kernels: list[tracing.KernelRun]


@dataclass(frozen=True)
class GpuTimes:
    """What a GPU alone gives. traced, graph_us: asked for with `trace`; graph_us: of replays of a CUDA graph, None
    where the call cannot be captured."""

    after: AfterTheCall
    traced: TracedCalls | None = None
    graph_us: list[float] | None = None

    def to_json(self) -> dict:
        return {"after": self.after, **({**vars(self.traced), "graph_us": self.graph_us} if self.traced else {})}


def after_the_call(call, timer: GatedTimer, restore) -> AfterTheCall:
    """Medians of some calls in turn. Work on another stream escapes a pair of events, and shows here."""
    samples = [(*after_one(call, restore), after_one(timer.flush)[1]) for _ in range(STRAY_CALLS)]
    taken, stray, idle = (sorted(column)[len(samples) // 2] for column in zip(*samples, strict=True))
    return AfterTheCall(taken, stray, idle)


def after_one(call, restore=lambda: None) -> tuple[float, float]:
    """Microseconds of a call between two events, and from its end to an idle GPU by the host's clock."""
    restore()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    since = perf_counter()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000, (perf_counter() - since) * 1e6


def traced(call, timer: GatedTimer, restore) -> TracedCalls:
    """The times of some calls from CUPTI, with a cold cache, without the pauses between their kernels, which tracing
    makes longer."""
    calls = []
    for _ in range(TRACED_CALLS):
        restore()
        calls.append(tracing.kernels_of(call, before=timer.flush))
    busy_us = [intervals.busy_us([(kernel.start_us, kernel.us) for kernel in kernels]) for kernels in calls]
    return TracedCalls(busy_us, calls[-1])


def graph_us(call, timer: GatedTimer, restore) -> list[float] | None:
    """Times in microseconds of the call replayed from a CUDA graph, cache cold; None where it cannot be captured."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except Exception:
        return None
    times = []
    for _ in range(GRAPH_REPLAYS):
        restore()
        times.append(timer(graph.replay)[0])
    return times
