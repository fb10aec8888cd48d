"""The times of one workload, summed up, and what a reader of them is warned of. Pure."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, fields

from ..hardware.card import GpuState
from .correctness import KernelShare

JSON_NAMES = {"latency": "latency_us", "event": "event_us"}  # of the fields that have another name in JSON
LAUNCH_BOUND = 1.5  # a call that takes this multiple of its GPU time waits for the host
# Two clocks for the same time. On an H200 CUPTI gave 1.1 to 1.3 us less than events without their own overhead, at 30
# us and at four times that; Nsight Compute lay within 0.2 us of the latter. Events see the pause before each further
# kernel too.
CLOCKS_US = 2.0  # for each kernel
CLOCKS_SHARE = 0.05
# A warm call is timed by another process's clock, in stretches of a hundred calls whose ends it knows to 0.1 ms.
SHORTEST_US = 1.0


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

    @property
    def warm_words(self) -> str | None:
        """ "3.28 us"; None where the clock that timed warm calls tells nothing of so short ones."""
        return f"{self.warm_us:.2f} us" if self.warm_us >= SHORTEST_US else None

    def warnings(self) -> list[str]:
        """Warnings for a reader of these times."""
        return [*self._doubts_about_clocks(), *self._doubts_about_conditions()]

    def _doubts_about_clocks(self) -> Iterator[str]:
        apart_us = abs(self.gpu_us - self.cupti_us) if self.cupti_us else 0.0
        if apart_us and apart_us > CLOCKS_SHARE * self.gpu_us + CLOCKS_US * len(self.kernels):
            yield f"two clocks disagree: {self.cupti_us:.1f} us by CUPTI, {self.gpu_us:.1f} us by events"
        if self.kernels == []:
            yield "one clock alone: CUPTI named no kernel, so the times by events have nothing to agree with"

    def _doubts_about_conditions(self) -> Iterator[str]:
        if self.launch_bound:
            works = f", of which the GPU works {self.warm_us:.1f}" if self.warm_words else ""
            graph = f", {self.graph_us:.1f} us from a CUDA graph" if self.graph_us else ""
            yield f"launch-bound: a call takes {self.call_us:.1f} us{works}{graph}"
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
