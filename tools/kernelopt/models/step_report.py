"""What a profile of a step says: idle time, launch-bound stretches, groups, other ways of running. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ..hardware.work import ModuleWork
from ..intervals import busy_us
from ..measure import pairing
from ..model_types import most_saved_pct
from ..statuses import Speed
from .groups import Floor, Group, groups, pattern_of
from .step_trace import StepTrace, Unit

LEAST_KERNELS = 8  # of a launch-bound stretch
MOST_STRETCHES = 3
EAGER_GRAPH = "graph"  # the way of running that is a CUDA graph of the eager step


@dataclass(frozen=True)
class WayTime:
    """A way of running the step, held against the eager one in turn. us: median. failed: why it did not run; the
    figures are then None."""

    name: str
    us: float | None
    speedup: float | None
    ci95: tuple[float, float] | None
    verdict: str | None
    failed: str | None

    @property
    def is_faster(self) -> bool:
        return self.verdict == Speed.FASTER


@dataclass(frozen=True)
class Stretch:
    """Kernels in a row before each of which the GPU waited longer than the kernel took. first, last: their modules.
    us: from the first to the last."""

    first: str
    last: str
    kernels: int
    us: float
    idle_pct: float


@dataclass(frozen=True)
class StepReport:
    """step_us: of an eager step without the profiler, median. busy_us: in which at least one kernel ran; None without a
    GPU. source: "measured" or "recorded". card: whose rates the floors are of; None without floors."""

    model: str
    workload: str
    training: bool
    device: str
    torch: str
    source: str
    on_gpu: bool
    parameters: int
    step_us: float
    busy_us: float | None
    kernels: int
    card: str | None
    stretches: tuple[Stretch, ...]
    ways: tuple[WayTime, ...]
    groups: tuple[Group, ...]

    @property
    def idle_pct(self) -> float | None:
        """Share of the step in which the GPU waits."""
        return None if self.busy_us is None else 100 * max(0.0, 1 - self.busy_us / self.step_us)

    def waits_us(self, group: Group, way: WayTime | None = None) -> float:
        """How long the GPU waits at most for a group's launches in a step. way: None for the eager step.

        The eager step waits for the host, no longer than the host is busy with the group. In a CUDA graph of it each
        kernel waits for the one before. Of a compiled step that is unknown, and counts as nothing.
        """
        if self.busy_us is None or (way and way.name != EAGER_GRAPH):
            return 0.0
        waits_us = max(0.0, (way.us if way else self.step_us) - self.busy_us)
        return waits_us * group.kernels / self.kernels if way else min(waits_us, group.host_pct / 100 * self.step_us)

    def saved_us(self, group: Group) -> float | None:
        """What the eager step could save of a group at most: GPU time above its floor, and waiting for its launches."""
        return None if group.saved_us is None else group.saved_us + self.waits_us(group)

    def saved_pct(self, group: Group, way: WayTime | None = None) -> float | None:
        """The share of a step that a group could save at most. way: None for the eager step."""
        if group.saved_us is None:
            return None
        saved_us = group.saved_us + self.waits_us(group, way)
        return most_saved_pct(saved_us, group.floor.us, way.us if way else self.step_us)

    def best_way(self) -> WayTime | None:
        """The fastest of the ways that are faster than the eager step; None when none is."""
        return max((way for way in self.ways if way.is_faster), key=lambda way: way.speedup, default=None)

    def group(self, number: int) -> Group | None:
        return next((group for group in self.groups if group.number == number), None)

    def to_json(self) -> dict:
        written = [
            {
                **asdict(group),
                "name": group.name,
                "share_of_step_pct": min(100.0, 100 * group.us / self.step_us),
                "step_saved_us": self.saved_us(group),
                "saved_pct": self.saved_pct(group),
            }
            for group in self.groups
        ]
        return {**asdict(self), "idle_pct": self.idle_pct, "groups": written}


def way_time(name: str, times: dict) -> WayTime:
    """times: worker.model_steps.StepTimes, the eager step before, the other way after."""
    if times["failed"]:
        return WayTime(name, None, None, None, None, times["failed"])
    compared = pairing.compare([pairing.PairedTimes(a_us=times["after_us"], b_us=times["before_us"])])
    us = statistics.median(one for pair in times["after_us"] for one in pair)
    return WayTime(name, us, compared.speedup, compared.ci95, str(compared.verdict), None)


def step_report(
    trace: StepTrace, work: Sequence[ModuleWork], floor_of: Callable[[list[ModuleWork]], Floor | None], **facts
) -> StepReport:
    """The report of a trace. facts: the other fields. Without a GPU there are no floors."""
    units = trace.units
    floor = floor_of if trace.on_gpu else lambda _: None
    return StepReport(
        on_gpu=trace.on_gpu,
        busy_us=busy_us([(unit.start_us, unit.us) for unit in units]) if trace.on_gpu else None,
        kernels=len(units),
        stretches=tuple(stretches(units)) if trace.on_gpu else (),
        groups=tuple(groups(trace, work, floor)),
        **facts,
    )


def stretches(units: Sequence[Unit]) -> list[Stretch]:
    """The longest launch-bound stretches."""
    made: list[Stretch] = []
    run: list[Unit] = []
    waited, end = 0.0, None
    for unit in units:
        gap = 0.0 if end is None else max(0.0, unit.start_us - end)
        if run and gap <= unit.us:
            made += stretch(run, waited)
            run = []
        if gap > unit.us:
            waited = waited + gap if run else 0.0
            run.append(unit)
        end = max(end or 0.0, unit.start_us + unit.us)
    made += stretch(run, waited)
    return sorted(made, key=lambda one: -one.us)[:MOST_STRETCHES]


def stretch(run: list[Unit], waited_us: float) -> list[Stretch]:
    if len(run) < LEAST_KERNELS:
        return []
    us = run[-1].start_us + run[-1].us - run[0].start_us
    first, last = (pattern_of(unit.place.module) for unit in (run[0], run[-1]))
    return [Stretch(first, last, len(run), us, 100 * waited_us / us)]
