"""The diagnosis of a profile as it is passed on. `Diagnosis.to_json` is what analyze_profile.py prints."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ..profilers.profile import KernelProfile, Metrics, NvidiaRule

Limits = Mapping[str, float]  # name of a threshold -> its value (reference/thresholds.json)


@dataclass(frozen=True)
class Classification:
    """bottleneck: memory, compute, latency, underutilized, balanced or unknown. limiter: the unit, the pipe or the
    stall; None where none of them leads."""

    bottleneck: str
    limiter: str | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class KernelSummary:
    """One kernel of the call. share_pct: of the call's GPU time; None where a duration is unknown."""

    name: str
    share_pct: float | None
    duration_us: float | None
    classification: Classification

    def to_json(self) -> dict:
        return {
            "name": self.name,
            "share_pct": self.share_pct,
            "duration_us": self.duration_us,
            "class": self.classification.bottleneck,
            "limiter": self.classification.limiter,
        }


def summaries(kernels: Sequence[KernelProfile], classes: Sequence[Classification]) -> tuple[KernelSummary, ...]:
    """Each kernel of a call with its class and its share of the call's GPU time."""
    times = [kernel.duration_us for kernel in kernels]
    total = None if None in times else sum(times)
    return tuple(
        KernelSummary(kernel.name, 100 * kernel.duration_us / total if total else None, kernel.duration_us, judged)
        for kernel, judged in zip(kernels, classes, strict=True)
    )


@dataclass(frozen=True)
class Observation:
    """A value that a finding rests on."""

    metric: str
    value: float | None
    unit: str


@dataclass(frozen=True)
class Finding:
    """Evidence, the inference from it, and actions. estimated_gain_pct: the share of the call's time that the actions
    could save at most; None unknown. severity: high, medium, low, or info where the gain is unknown."""

    id: str
    severity: str
    estimated_gain_pct: float | None
    evidence: tuple[Observation, ...]
    inference: str
    actions: tuple[str, ...]
    wiki: str
    falsified_by: str


@dataclass(frozen=True)
class Floor:
    """share_pct: floor over time of the call. bound: memory or compute. basis: the rate and the clock, in words.
    library_rate: the rate is what a library reaches. It bounds no gain and is no reason to stop. peak_pct: share of the
    documented peak; None not known."""

    share_pct: float
    bound: str
    basis: str = "by the profile's duration"
    library_rate: bool = False
    peak_pct: float | None = None

    @property
    def most_gain_pct(self) -> float | None:
        """The most percent of the time that a version can save: down to the floor, or to the documented peak where a
        library's rate stands in for the floor. None not known."""
        share = self.peak_pct if self.library_rate else self.share_pct
        return None if share is None else max(0.0, 100 - share)


@dataclass(frozen=True)
class SpeedOfLight:
    """How close a kernel runs to the rates of the hardware. efficiency_pct: the higher of the two SOL percentages.
    at_roofline: DRAM or an arithmetic pipe is used up; None where DRAM has no metric and no pipe is used up.
    floor_share_pct: floor over time of the whole call. None everywhere: not known. library_rate: see Floor."""

    compute_sol_pct: float | None
    memory_sol_pct: float | None
    efficiency_pct: float | None
    headroom_pct: float | None
    at_roofline: bool | None
    uses_tensor_cores: bool | None
    floor_share_pct: float | None
    floor_basis: str | None
    converged: bool
    should_stop: bool
    reason: str
    warnings: tuple[str, ...]
    library_rate: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """longest, classification, metrics: of the kernel that takes most time. findings: the largest gain first.

    missing_metrics: requested and not collected. not_on_architecture: those that no GPU of this architecture ("sm_90")
    has, so they are no lost evidence; empty where the architecture is unknown. second_opinion: NVIDIA's own rules on
    the longest kernel. warnings: why the report may not be of the intended kernel. speed_of_light: None on AMD.
    """

    kernels: tuple[KernelSummary, ...]
    longest: str
    classification: Classification
    metrics: Metrics
    missing_metrics: tuple[str, ...]
    architecture: str | None = None
    not_on_architecture: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    second_opinion: tuple[NvidiaRule, ...] = ()
    warnings: tuple[str, ...] = ()
    speed_of_light: SpeedOfLight | None = None

    def to_json(self) -> dict:
        judged = self.classification
        light = {} if self.speed_of_light is None else {"speed_of_light": asdict(self.speed_of_light)}
        return {
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "classification": {
                "of": self.longest,
                "class": judged.bottleneck,
                "limiter": judged.limiter,
                "reasons": judged.reasons,
            },
            "metrics": dict(self.metrics),
            "missing_metrics": self.missing_metrics,
            "architecture": self.architecture,
            "not_on_architecture": self.not_on_architecture,
            "findings": [asdict(finding) for finding in self.findings],
            "second_opinion": [asdict(rule) for rule in self.second_opinion],
            "warnings": self.warnings,
            **light,
        }
