"""May a candidate enter the history? Pure functions of the measurement."""

from dataclasses import dataclass

from ..hardware.roofline import Utilization
from ..measure import correctness, gain
from ..measure.gain import MAIN, SpeedUp
from ..measure.pairing import Comparison
from ..measure.verdict import INTERPRETER, Verdict
from ..statuses import Status

UNCHECKED_WORK = (
    f"{Status.OWN_WORK_NOT_CHECKED}: torch's profiler (CUPTI) named no kernel of the candidate, so nobody knows whose "
    "work this is; launch its kernels in the call itself, start no profiler in it or round the gate, and judge it again"
)


@dataclass(frozen=True)
class Decision:
    """Is a candidate accepted, and why?"""

    accepted: bool
    reason: str


def decide(verdict: Verdict, utilization: Utilization | None, comparisons: dict[str, Comparison] | None) -> Decision:
    """The decision on a candidate.

    utilization: of the default workload (None when the wiki lacks the roof). comparisons: of each workload with the
    best version; None for a first version."""
    if reason := unfit(verdict, utilization):
        return Decision(False, reason)
    if comparisons is None:
        return Decision(True, "first version: correct, its latency is the baseline")
    return by_speed(comparisons)


def unfit(verdict: Verdict, utilization: Utilization | None) -> str | None:
    """The reason why a candidate may not enter the history, at any speed."""
    if verdict.status != Status.OK:
        return verdict.summary
    if verdict.device == INTERPRETER:
        return "ran in the CPU interpreter; only a GPU result can be accepted"
    if verdict.own_work == correctness.NOT_CHECKED:
        return UNCHECKED_WORK
    if utilization and utilization.below_physical_limit:
        return f"{Status.IMPOSSIBLE_TIME}: {impossible(utilization.time_us, utilization.limit_us)}"
    return None


def by_speed(comparisons: dict[str, Comparison]) -> Decision:
    """Is a right candidate a gain over the best version? The reason is of the workload that decides."""
    speed_ups = {workload: SpeedUp.of(one) for workload, one in comparisons.items()}
    at, lost, main = gain.gain_at(speed_ups), gain.loss_at(speed_ups), comparisons[MAIN]
    if at is None:
        return Decision(False, f"{main.verdict} against the best version: {main.describe()}")
    if lost:
        slower = comparisons[lost].describe()
        return Decision(False, f"faster on the {at} workload, but slower on {lost}: {slower}")
    if at == MAIN:
        return Decision(True, f"correct and FASTER: {main.describe()}")
    gained = comparisons[at].describe()
    return Decision(True, f"correct and FASTER on {at}: {gained}; {MAIN} {main.verdict}, {main.describe()}")


def impossible(time_us: float, limit_us: float) -> str:
    """The message about a time that no hardware allows."""
    return (
        f"{time_us:.2f} us, where the documented peaks of this card allow no less than {limit_us:.2f} us for the work "
        "that was counted; the kernel leaves work out, or the count is wrong (by hand: --flops N --bytes N "
        "--work-dtype DTYPE of estimate_work.py, for a workspace, or of measure_kernel_time.py)"
    )


def is_impossible(reason: str | None) -> bool:
    """Was a kernel refused because no hardware allows its time? Older records call it BELOW_FLOOR."""
    return (reason or "").startswith((Status.IMPOSSIBLE_TIME, "BELOW_FLOOR"))
