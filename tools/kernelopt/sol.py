"""Speed of light: how close a profiled kernel runs to what the hardware gives, and whether to go on. Pure functions.

Two different questions. At the roofline: DRAM or an arithmetic pipe is used up by what this kernel does (a saturated L1 or L2 with
an idle DRAM is not that: other code for the same problem may not need it). At the floor: the problem itself allows little more;
that decides.
"""

PIPES = ("tensor_cycles", "fma_cycles", "alu_cycles", "fp64_cycles", "xu_instructions")
NEEDED = ("sm_throughput", "memory_throughput", "dram_throughput", "tensor_cycles")


def analyse(m: dict, floor_share_pct: float | None, earlier_pct: list[float], limits: dict) -> dict:
    """{compute_sol_pct, memory_sol_pct, efficiency_pct, headroom_pct, at_roofline, uses_tensor_cores, floor_share_pct, converged,
    should_stop, reason, warnings} of a kernel's metrics.

    efficiency: the higher of the two SOL figures. floor_share_pct: floor over time of the whole call, None unknown. earlier_pct:
    efficiencies of the versions before, oldest first.
    """
    compute, memory = m.get("sm_throughput"), m.get("memory_throughput")
    known = [value for value in (compute, memory) if value is not None]
    efficiency = max(known) if known else None
    ends = {key: m[key] for key in ("dram_throughput", *PIPES) if m.get(key) is not None}
    at_roofline = max(ends.values()) >= limits["at_roofline_pct"] if ends else None
    tensor = m.get("tensor_cycles")
    converged = has_converged([*earlier_pct, efficiency] if efficiency is not None else [], limits)
    stop, reason = should_stop(floor_share_pct, at_roofline, converged, limits)
    return {
        "compute_sol_pct": compute,
        "memory_sol_pct": memory,
        "efficiency_pct": efficiency,
        "headroom_pct": None if efficiency is None else max(0.0, 100 - efficiency),
        "at_roofline": at_roofline,
        "uses_tensor_cores": None if tensor is None else tensor >= limits["tensor_idle_pct"],
        "floor_share_pct": floor_share_pct,
        "converged": converged,
        "should_stop": stop,
        "reason": reason,
        "warnings": [f"{key} was not collected" for key in NEEDED if m.get(key) is None],
    }


def has_converged(efficiencies_pct: list[float], limits: dict) -> bool:
    """Did the last profiles differ by next to nothing?"""
    last = efficiencies_pct[-int(limits["converged_rounds"]) :]
    return len(last) == limits["converged_rounds"] and max(last) - min(last) < limits["converged_points"]


def should_stop(
    floor_share_pct: float | None, at_roofline: bool | None, converged: bool, limits: dict
) -> tuple[bool, str]:
    """(stop, why)"""
    if floor_share_pct is not None and floor_share_pct >= limits["at_floor_pct"]:
        return True, f"{floor_share_pct:.1f} % of the floor: the problem allows little more"
    if floor_share_pct is not None and at_roofline:
        return False, (
            f"the hardware is used up, at {floor_share_pct:.1f} % of the floor: the kernel does more work than the problem needs"
        )
    if floor_share_pct is None and at_roofline:
        return (
            True,
            "the hardware is used up; whether the problem needs that work is unknown (no count of it, estimate_work.py)",
        )
    if converged:
        return (
            True,
            f"the last {limits['converged_rounds']:.0f} profiles show the same: another direction, or a partial restart",
        )
    return False, "neither at the floor nor at the roofline"
