"""Speed of light: how close a profiled kernel runs to what the hardware gives, and whether to go on. Pure functions.

Two different questions. At the roofline: DRAM or an arithmetic pipe is used up by what this kernel does (a saturated L1 or L2 with
an idle DRAM is not that: other code for the same problem may not need it). At the floor: at the rate that the floor is reckoned
with, the problem allows little more; that decides. Without a floor nobody knows, and nothing says stop but a standstill.
"""

from ..profilers import metrics

PIPES = ("tensor_cycles", "fma_cycles", "alu_cycles", "fp64_cycles", "xu_instructions")
FLOOR_UNKNOWN = "floor unknown: no count of the least work (estimate_work.py), or no such GPU in the wiki"
NEEDED = ("sm_throughput", "memory_throughput", "dram_throughput", "tensor_cycles")


def analyse(
    m: dict,
    floor_share_pct: float | None,
    earlier_pct: list[float],
    limits: dict,
    basis: str = "by the profile's duration",
) -> dict:
    """{compute_sol_pct, memory_sol_pct, efficiency_pct, headroom_pct, at_roofline, uses_tensor_cores, floor_share_pct,
    floor_basis, converged, should_stop, reason, warnings} of a kernel's metrics.

    efficiency: the higher of the two SOL figures. floor_share_pct: floor over time of the whole call, None unknown. earlier_pct:
    efficiencies of the versions before, oldest first. basis: the rate and the clock of the floor's share, in words.
    """
    efficiency = efficiency_pct(m)
    ends = {key: m[key] for key in ("dram_throughput", *PIPES) if m.get(key) is not None}
    used_up = any(value >= limits["at_roofline_pct"] for value in ends.values())
    at_roofline = used_up or (False if "dram_throughput" in ends else None)  # some GPUs have no counter of their DRAM
    tensor, elsewhere = m.get("tensor_cycles"), metrics.not_on(metrics.capability(m))
    converged = has_converged([*earlier_pct, efficiency] if efficiency is not None else [], limits)
    share = None if floor_share_pct is None else f"{floor_share_pct:.1f} % of the floor {basis}".rstrip()
    at_floor = floor_share_pct is not None and floor_share_pct >= limits["at_floor_pct"]
    stop, reason = should_stop(share, at_floor, at_roofline, converged, limits)
    return {
        "compute_sol_pct": m.get("sm_throughput"),
        "memory_sol_pct": m.get("memory_throughput"),
        "efficiency_pct": efficiency,
        "headroom_pct": None if efficiency is None else max(0.0, 100 - efficiency),
        "at_roofline": at_roofline,
        "uses_tensor_cores": None if tensor is None else tensor >= limits["tensor_idle_pct"],
        "floor_share_pct": floor_share_pct,
        "floor_basis": None if floor_share_pct is None else basis,
        "converged": converged,
        "should_stop": stop,
        "reason": reason,
        "warnings": [f"{key} was not collected" for key in NEEDED if m.get(key) is None and key not in elsewhere],
    }


def efficiency_pct(m: dict) -> float | None:
    """The higher of SM and memory throughput; None when neither was collected."""
    known = [m[key] for key in ("sm_throughput", "memory_throughput") if m.get(key) is not None]
    return max(known, default=None)


def has_converged(efficiencies_pct: list[float], limits: dict) -> bool:
    """Did the last profiles differ by next to nothing?"""
    last = efficiencies_pct[-int(limits["converged_rounds"]) :]
    return len(last) == limits["converged_rounds"] and max(last) - min(last) < limits["converged_points"]


def should_stop(
    share: str | None, at_floor: bool, at_roofline: bool | None, converged: bool, limits: dict
) -> tuple[bool, str]:
    """(stop, why). share: the floor's share in words, None unknown."""
    if at_floor:
        return True, f"{share}: at that rate little is left"
    if converged:
        standstill = f"the last {limits['converged_rounds']:.0f} profiles show the same"
        return True, f"{standstill}, {share or FLOOR_UNKNOWN}: another direction, or a partial restart"
    used = "the hardware is used up" if at_roofline else None
    if share is None:
        return False, "; ".join(part for part in (FLOOR_UNKNOWN, used) if part)
    if used:
        return False, f"{used}, at {share}: the kernel does more work than the problem needs, or does it badly"
    if at_roofline is None:
        return False, f"{share}; no pipe is used up, and of DRAM nothing is known"
    return False, f"{share}; neither DRAM nor a pipe is used up"
