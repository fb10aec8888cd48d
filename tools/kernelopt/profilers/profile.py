"""A profile as it is passed on: kernels with their metrics, the parameters of the run, a timeline. JSON at the edge."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from ..hardware import wiki
from .timeline import Timeline

Metrics = Mapping[str, float | None]  # key of the metric schema -> value in its unit; None: not collected


@dataclass(frozen=True)
class NvidiaRule:
    """A finding of Nsight Compute itself. speedup_pct: its estimate for the whole kernel, if it makes one."""

    name: str
    message: str
    speedup_pct: float | None


@dataclass(frozen=True)
class KernelProfile:
    """One kernel of the profiled call. duration_us: None where the report has no duration."""

    name: str
    duration_us: float | None
    metrics: Metrics
    rules: tuple[NvidiaRule, ...] = ()

    @classmethod
    def from_json(cls, row: dict) -> "KernelProfile":
        rules = tuple(NvidiaRule(**rule) for rule in row.get("rules", ()))
        return cls(row["name"], row["duration_us"], dict(row["metrics"]), rules)

    def to_json(self) -> dict:
        return {
            "name": self.name,
            "duration_us": self.duration_us,
            "metrics": dict(self.metrics),
            "rules": [dataclasses.asdict(rule) for rule in self.rules],
        }


@dataclass(frozen=True)
class Params:
    """params.json: the profiled kernel, its GPU and the settings.

    counters: "unavailable" where the profiler had no permission to read them. triton: the functions of the
    kernel's file that Triton compiled, {name, compiled, autotuned} each. wall_s: of the profiled process.
    gpu_state: GpuState as JSON.
    """

    version: str
    kernel_sha256: str
    workload: str
    shapes: list
    dtype: str
    device: str
    profiler: str
    cache: str
    clocks: str
    timestamp: str
    driver: str | None = None
    torch: str | None = None
    gpu_state: dict | None = None
    triton: list[dict] = dataclasses.field(default_factory=list)
    wall_s: float | None = None
    counters: str | None = None

    @classmethod
    def from_json(cls, values: dict) -> "Params":
        """TypeError where a setting is missing. A key that is not known here is ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_json(self) -> dict:
        values = dataclasses.asdict(self)
        if self.counters is None:
            del values["counters"]
        return values


@dataclass(frozen=True)
class Doubt:
    """Counters of one dispatch that are not believed. dispatch: rocprofv3's number of the launch."""

    kernel: str
    dispatch: int
    counters: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Profile:
    """One profiled call.

    kernels: in launch order; empty where only a timeline was taken. work: {flops, bytes_min, dtype} of the problem.
    params: None for a report that was made elsewhere. recorded_us: the latency that the workspace recorded of this
    kernel. product: the page of its GPU. is_amd: read from rocprofv3. doubts: its counters that are not believed.
    """

    kernels: tuple[KernelProfile, ...] = ()
    work: dict | None = None
    params: Params | None = None
    timeline: Timeline | None = None
    recorded_us: float | None = None
    product: wiki.Page | None = None
    is_amd: bool = False
    doubts: tuple[Doubt, ...] = ()

    @property
    def longest(self) -> KernelProfile:
        return max(self.kernels, key=lambda kernel: kernel.duration_us or 0)

    @property
    def total_us(self) -> float | None:
        """Time of all kernels of the call under the profiler; None where one duration is unknown."""
        times = [kernel.duration_us for kernel in self.kernels]
        return None if None in times else sum(times)

    @classmethod
    def from_json(cls, metrics: dict, params: dict | None = None) -> "Profile":
        """From the contents of metrics.json and params.json. KeyError, TypeError or AttributeError: another shape."""
        kernels = tuple(KernelProfile.from_json(row) for row in metrics["kernels"])
        return cls(kernels, metrics.get("work"), None if params is None else Params.from_json(params))

    def to_json(self) -> dict:
        """The contents of metrics.json."""
        return {"kernels": [kernel.to_json() for kernel in self.kernels], "work": self.work}
