"""All measurements of a candidate. acceptance.decide judges them, the record keeps them, a remote process sends
them."""

from dataclasses import dataclass, field

from ..hardware.roofline import Utilization
from ..measure.latency import Timing
from ..measure.pairing import Comparison
from ..measure.verdict import Verdict


@dataclass(frozen=True)
class Measurement:
    """timings, comparisons: by workload; empty or None where the candidate is wrong. utilization: of the default
    workload.

    against: the version that it was compared with; None for a first version, which has no comparisons either.
    seconds: what each step took; steps may run beside each other.
    """

    kernel_sha256: str
    verdict: Verdict
    timings: dict[str, Timing] = field(default_factory=dict)
    utilization: Utilization | None = None
    comparisons: dict[str, Comparison] | None = None
    against: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict:
        return {
            "kernel_sha256": self.kernel_sha256,
            "verify": self.verdict.to_json(),
            "latencies": {name: timing.to_json() for name, timing in self.timings.items()},
            "utilization": self.utilization and self.utilization.to_json(),
            "comparisons": self.comparisons and {name: one.to_json() for name, one in self.comparisons.items()},
            "against": self.against,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, measurement: dict) -> "Measurement":
        utilization, comparisons = measurement["utilization"], measurement["comparisons"]
        return cls(
            kernel_sha256=measurement["kernel_sha256"],
            verdict=Verdict.from_json(measurement["verify"]),
            timings={name: Timing.from_json(timing) for name, timing in measurement["latencies"].items()},
            utilization=utilization and Utilization(**utilization),
            comparisons=comparisons and {name: Comparison.from_json(one) for name, one in comparisons.items()},
            against=measurement["against"],
            seconds=measurement["seconds"],
        )
