"""The record of one version. reference/v_iteration.schema.json describes its JSON, and each class here is one object of
it.

`Record.from_json` makes a Record from JSON that the schema has accepted. `to_json` returns the same keys in the same
order.
"""

from dataclasses import asdict, dataclass

from ..statuses import Speed


@dataclass(frozen=True)
class PreviousComparison:
    """The paired comparison with the best version of that time. speedup: the factor; ci95: its 95 % interval, low
    and high."""

    against: str
    verdict: str
    speedup: float
    ci95: tuple[float, float]

    @classmethod
    def from_json(cls, value: dict) -> "PreviousComparison":
        return cls(**{**value, "ci95": tuple(value["ci95"])})


@dataclass(frozen=True)
class Performance:
    """The measured values; each name ends with its unit. The rates, the median latency_us and comparison_with_previous
    belong to `workload`. comparison_by_workload: of all workloads; absent in archived records, and then None."""

    workload: str | None
    latency_us: float | None
    p20_us: float | None
    p80_us: float | None
    runs: int | None
    latency_us_by_workload: dict[str, float] | None
    tflops: float | None
    bandwidth_gbps: float | None
    tflops_peak_utilization_pct: float | None
    bandwidth_peak_utilization_pct: float | None
    floor_us: float | None
    floor_share_pct: float | None
    gpu_state: dict | None
    comparison_with_previous: PreviousComparison | None
    comparison_by_workload: dict[str, PreviousComparison] | None = None

    @classmethod
    def from_json(cls, value: dict) -> "Performance":
        compared, all_compared = value["comparison_with_previous"], value.get("comparison_by_workload")
        parts = {
            "comparison_with_previous": compared and PreviousComparison.from_json(compared),
            "comparison_by_workload": all_compared
            and {name: PreviousComparison.from_json(one) for name, one in all_compared.items()},
        }
        return cls(**{**value, **parts})


@dataclass(frozen=True)
class Optimization:
    """The plan of the round, in the author's words."""

    action_category: str | None
    action_description: str | None
    expected_impact: str | None
    risks_and_rollback: str | None


@dataclass(frozen=True)
class ProfileEvidence:
    """The evidence from the profile of the previous version. evidence_chain: evidence -> inference -> action."""

    tool_used: str | None
    evidence_summary: str | None
    evidence_chain: str | None
    bottleneck_type: str | None


@dataclass(frozen=True)
class Correctness:
    """The result of the verifier. status: PASS, FAIL or TIMEOUT_FAIL. rel_err: worst |error| / (|reference| + scale)
    of all cases."""

    status: str | None
    verify_status: str | None
    rel_err: float | None
    summary: str | None


@dataclass(frozen=True)
class IsaMetric:
    """An instruction metric that a version improves. met: whether it has reached the target."""

    metric: str
    target: float | str
    current: float | str | None
    met: bool


@dataclass(frozen=True)
class Search:
    """One search by the author. source: profile, gpu-wiki, ref-project or public-web."""

    source: str
    query: str
    finding: str
    actionability: str


@dataclass(frozen=True)
class Pitfall:
    """An error that the author made, and the lesson from it."""

    error_type: str
    error_message: str
    root_cause: str
    fix_applied: str
    lesson: str


@dataclass(frozen=True)
class Reference:
    """A source that the author used, or the exploration's row that the kernel came from."""

    source_type: str
    path_or_url: str
    description: str


@dataclass(frozen=True)
class QualityGate:
    """The verdict of the gate: PASS, FAIL or TIMEOUT_FAIL, and None before the verdict."""

    result: str | None
    failure_reason: str | None


@dataclass(frozen=True)
class Record:
    """The record of one version: memory/vN.json. timestamp: UTC. device: the GPU's name, or cpu-interpreter."""

    version: str
    masked: bool
    timestamp: str
    kernel_sha256: str | None
    device: str | None
    performance: Performance
    optimization: Optimization
    profile_evidence: ProfileEvidence
    correctness: Correctness
    isa_metric_progress: tuple[IsaMetric, ...]
    search_log: tuple[Search, ...]
    pitfalls_and_fixes: tuple[Pitfall, ...]
    references: tuple[Reference, ...]
    quality_gate: QualityGate
    git_commit_hash: str | None

    @classmethod
    def from_json(cls, value: dict) -> "Record":
        """Make a record from a JSON object that its schema has accepted. Other objects raise KeyError or TypeError."""
        parts = {name: kind(**value[name]) for name, kind in OBJECTS.items()}
        lists = {name: tuple(kind(**entry) for entry in value[name]) for name, kind in LISTS.items()}
        return cls(**{**value, **parts, **lists, "performance": Performance.from_json(value["performance"])})

    def to_json(self) -> dict:
        """The JSON object."""
        return asdict(self, dict_factory=_json_object)

    @property
    def is_judged(self) -> bool:
        """Whether the gate has given a verdict."""
        return self.quality_gate.result is not None

    @property
    def passed(self) -> bool:
        """Whether the verdict is PASS."""
        return self.quality_gate.result == "PASS"

    @property
    def is_accepted(self) -> bool:
        """Whether the version passed the gate and the history holds its kernel."""
        return self.passed and self.git_commit_hash is not None

    @property
    def latency_us(self) -> float | None:
        """The median latency of the default workload."""
        return self.performance.latency_us

    @property
    def comparison(self) -> PreviousComparison | None:
        """The paired comparison with the best version of that time."""
        return self.performance.comparison_with_previous

    @property
    def deciding(self) -> tuple[str, PreviousComparison] | None:
        """(workload, its comparison): the default one; where an accepted version is not FASTER there, the one with the
        greatest speed-up of those where it is."""
        main, others = self.comparison, self.performance.comparison_by_workload or {}
        faster = {at: one for at, one in others.items() if one.verdict == Speed.FASTER}
        if main is None or not self.passed or main.verdict == Speed.FASTER or not faster:
            return main and ("default", main)
        return max(faster.items(), key=lambda item: item[1].speedup)

    @property
    def gained(self) -> str | None:
        """ "1.986x as fast as v0", "1.986x as fast as v0 on tall" where that workload decided; None: not compared."""
        if self.deciding is None:
            return None
        workload, compared = self.deciding
        at = "" if workload == "default" else f" on {workload}"
        return f"{compared.speedup:.3f}x as fast as {compared.against}{at}"

    @property
    def action(self) -> str | None:
        """The change of the round, in the words of its plan."""
        return self.optimization.action_description


OBJECTS = {
    "optimization": Optimization,
    "profile_evidence": ProfileEvidence,
    "correctness": Correctness,
    "quality_gate": QualityGate,
}
LISTS = {
    "isa_metric_progress": IsaMetric,
    "search_log": Search,
    "pitfalls_and_fixes": Pitfall,
    "references": Reference,
}


def _json_object(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object, in which a tuple is an array. An older record has no comparison_by_workload, and gets none."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in pairs
        if name != "comparison_by_workload" or value is not None
    }
