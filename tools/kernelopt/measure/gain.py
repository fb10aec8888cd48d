"""Is a kernel a gain over the best version, by its speed-ups on the workloads? One rule for the gate and for
explorations. Pure."""

import statistics
from dataclasses import dataclass

from ..statuses import Speed
from .pairing import LEAST, SAME, Comparison

MAIN = "default"  # the workload that a task always has
# The loss of another workload than the main one that does not yet count as a regression.
MAX_LOSS = 0.02


@dataclass(frozen=True)
class SpeedUp:
    """On one workload, over the best version. ci95: its 95 % interval. same: the share by which two kernels that count
    as equal may differ."""

    verdict: Speed
    point: float
    ci95: tuple[float, float]
    same: float = SAME

    @classmethod
    def of(cls, compared: Comparison) -> "SpeedUp":
        return cls(compared.verdict, compared.speedup, compared.ci95, max(SAME, compared.least_difference))

    @classmethod
    def by_interval(cls, point: float, ci95: tuple[float, float]) -> "SpeedUp":
        """Where nothing but the interval is known. A gate asks for LEAST at least."""
        low, high = ci95
        slower = Speed.SLOWER if high < 1 - LEAST else Speed.AMBIGUOUS
        return cls(Speed.FASTER if low > 1 + LEAST else slower, point, ci95)

    @property
    def may_be_level(self) -> bool:
        """Is it no certain loss, nor one above `same`?"""
        return self.verdict != Speed.SLOWER and self.ci95[0] >= 1 - self.same

    @property
    def counts_elsewhere(self) -> bool:
        """Is it a gain above `same` for certain? One of several workloads is above 1 by chance more often than one."""
        return self.verdict == Speed.FASTER and self.ci95[0] > 1 + self.same


def gain_at(speed_ups: dict[str, SpeedUp]) -> str | None:
    """The workload at which a kernel is a gain; None where at none.

    That is the main one where it is FASTER there. Else the one with the greatest speed-up of those where it is faster
    by more than `same`, if the main one may be level, and the geometric mean of all is above 1: so two kernels cannot
    take turns, each with its own workload. A main one that was not tried says nothing."""
    main = speed_ups.get(MAIN)
    if main and main.verdict == Speed.FASTER:
        return MAIN
    if main and not (main.may_be_level and statistics.geometric_mean(one.point for one in speed_ups.values()) > 1):
        return None
    counts = {at: one.point for at, one in speed_ups.items() if one.counts_elsewhere}
    return max(counts, key=counts.get, default=None)


def loss_at(speed_ups: dict[str, SpeedUp]) -> str | None:
    """The first workload beside the main one at which a kernel loses more than MAX_LOSS for certain; None where none
    is."""
    return next((at for at, one in speed_ups.items() if at != MAIN and one.ci95[1] < 1 - MAX_LOSS), None)
