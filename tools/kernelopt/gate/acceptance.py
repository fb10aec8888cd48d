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
    reason = unfit(verdict, utilization) or (comparisons and not_faster(comparisons))
    if reason:
        return Decision(False, reason)
    if comparisons is None:
        return Decision(True, "first version: correct, its latency is the baseline")
    return Decision(True, f"correct and FASTER{gained(comparisons)}")


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


def not_faster(comparisons: dict[str, Comparison]) -> str | None:
    """The reason why a candidate is no gain over the best version."""
    speed_ups = {workload: SpeedUp.of(one) for workload, one in comparisons.items()}
    at, lost = gain.gain_at(speed_ups), gain.loss_at(speed_ups)
    if at is None:
        return f"{comparisons[MAIN].verdict} against the best version: {comparisons[MAIN].describe()}"
    return lost and f"faster on the {at} workload, but slower on {lost}: {comparisons[lost].describe()}"


def gained(comparisons: dict[str, Comparison]) -> str:
    """ ": 1.234x (…)" of the default workload, " on tall: 1.234x (…); default EQUAL, 1.001x (…)" of another."""
    at = gain.gain_at({workload: SpeedUp.of(one) for workload, one in comparisons.items()})
    main = comparisons[MAIN]
    if at == MAIN:
        return f": {main.describe()}"
    return f" on {at}: {comparisons[at].describe()}; {MAIN} {main.verdict}, {main.describe()}"


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
