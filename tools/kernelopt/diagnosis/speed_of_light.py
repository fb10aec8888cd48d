"""Speed of light: how close a profiled kernel runs to the rates of the hardware, and whether to go on. Pure functions.

Two questions. At the roofline: this kernel uses up DRAM or an arithmetic pipe. A saturated L1 or L2 with an idle DRAM
does not count, because other code for the same problem may not need it. At the floor: at the rate of the floor the
problem allows little more. The floor decides when to stop. Without a floor, only a standstill does.
"""

from collections.abc import Sequence

from ..profilers import metrics
from ..profilers.profile import Metrics
from .diagnosis import Floor, Limits, SpeedOfLight

PIPES = ("tensor_cycles", "fma_cycles", "alu_cycles", "fp64_cycles", "xu_instructions")
FLOOR_UNKNOWN = "floor unknown: no count of the least work (estimate_work.py), or no such GPU in the wiki"
NEEDED = ("sm_throughput", "memory_throughput", "dram_throughput", "tensor_cycles")


def analyse(m: Metrics, floor: Floor | None, earlier_pct: Sequence[float], limits: Limits) -> SpeedOfLight:
    """earlier_pct: efficiencies of the versions before, oldest first."""
    efficiency = efficiency_pct(m)
    tensor, elsewhere = m.get("tensor_cycles"), metrics.not_on(metrics.capability(m))
    converged = efficiency is not None and has_converged([*earlier_pct, efficiency], limits)
    roofline = at_roofline(m, limits)
    stop, reason = should_stop(floor, roofline, converged, limits)
    return SpeedOfLight(
        compute_sol_pct=m.get("sm_throughput"),
        memory_sol_pct=m.get("memory_throughput"),
        efficiency_pct=efficiency,
        headroom_pct=None if efficiency is None else max(0.0, 100 - efficiency),
        at_roofline=roofline,
        uses_tensor_cores=None if tensor is None else tensor >= limits["tensor_idle_pct"],
        floor_share_pct=floor and floor.share_pct,
        floor_basis=floor and floor.basis,
        library_rate=bool(floor and floor.library_rate),
        converged=converged,
        should_stop=stop,
        reason=reason,
        warnings=tuple(f"{key} was not collected" for key in NEEDED if m.get(key) is None and key not in elsewhere),
    )


def at_roofline(m: Metrics, limits: Limits) -> bool | None:
    """Is DRAM or an arithmetic pipe used up? None where no pipe is, and the GPU has no metric of its DRAM."""
    ends = {key: m[key] for key in ("dram_throughput", *PIPES) if m.get(key) is not None}
    if any(value >= limits["at_roofline_pct"] for value in ends.values()):
        return True
    return False if "dram_throughput" in ends else None


def efficiency_pct(m: Metrics) -> float | None:
    """The higher of SM and memory throughput; None when neither was collected."""
    known = [m[key] for key in ("sm_throughput", "memory_throughput") if m.get(key) is not None]
    return max(known, default=None)


def has_converged(efficiencies_pct: list[float], limits: Limits) -> bool:
    """Do the last profiles differ by less than the threshold?"""
    last = efficiencies_pct[-int(limits["converged_rounds"]) :]
    return len(last) == limits["converged_rounds"] and max(last) - min(last) < limits["converged_points"]


def share_words(floor: Floor | None) -> str | None:
    """ "95.2 % of the floor at the copy rate, by the recorded latency"; None without a floor."""
    if floor is None:
        return None
    if floor.library_rate:
        return (
            f"{floor.share_pct:.1f} % of the time {floor.basis}, which is no floor "
            "(measure_ceiling.py --workspace W measures it)"
        )
    return f"{floor.share_pct:.1f} % of the floor {floor.basis}"


def least_left(limits: Limits) -> str:
    """ "3 %": what may be left of the time when the floor says stop."""
    return f"{100 - limits['at_floor_pct']:g} %"


def should_stop(floor: Floor | None, at_roofline: bool | None, converged: bool, limits: Limits) -> tuple[bool, str]:
    """(stop, why)"""
    share = share_words(floor)
    if floor and not floor.library_rate and floor.share_pct >= limits["at_floor_pct"]:
        return True, f"{share}: little is left, at most {least_left(limits)} of the time"
    if converged:
        standstill = f"the last {limits['converged_rounds']:.0f} profiles show the same"
        return True, f"{standstill}, {share or FLOOR_UNKNOWN}: another direction, or a partial restart"
    used = "DRAM or a pipe is used up" if at_roofline else None
    if share is None:
        return False, "; ".join(part for part in (FLOOR_UNKNOWN, used) if part)
    if not floor.library_rate:
        share += f": {100 - floor.share_pct:.1f} % of the time is left, more than {least_left(limits)}"
    if used:
        return False, f"{share}; {used}, so the kernel does more work than the problem needs, or does it badly"
    if at_roofline is None:
        return False, f"{share}; no pipe is used up, and of DRAM nothing is known"
    return False, f"{share}; neither DRAM nor a pipe is used up"
