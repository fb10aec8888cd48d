"""What limits a kernel on an AMD GPU, and its findings, from the metrics of rocprofv3. Pure functions.

The parser was tested on samples. It never ran on AMD hardware.
"""

from collections.abc import Iterator

from ..profilers.profile import Metrics, Profile
from .diagnosis import Classification, Diagnosis, Finding, Limits, summaries
from .findings import finding

LIMITERS = {  # metric -> (threshold from which it limits, name, class)
    "memory": ("amd_dram_pct", "dram", "memory"),
    "mfma_busy": ("amd_mfma_pct", "matrix cores", "compute"),
    "valu_busy": ("amd_valu_pct", "vector units", "compute"),
}


def diagnose(profile: Profile, limits: Limits, bandwidth_gbps: float | None) -> Diagnosis:
    """bandwidth_gbps: see `classify`."""
    classes = [classify(kernel.metrics, limits, bandwidth_gbps) for kernel in profile.kernels]
    absent = {key for kernel in profile.kernels for key, value in kernel.metrics.items() if value is None}
    judged = classes[profile.kernels.index(profile.longest)]
    return Diagnosis(
        kernels=summaries(profile.kernels, classes),
        longest=profile.longest.name,
        classification=judged,
        findings=tuple(one for rule in RULES for one in rule(profile.longest.metrics, judged, limits)),
        metrics=profile.longest.metrics,
        missing_metrics=tuple(sorted(absent)),
        warnings=tuple(f"{doubt.kernel}: {', '.join(doubt.counters)}: {doubt.reason}" for doubt in profile.doubts),
    )


def classify(m: Metrics, limits: Limits, bandwidth_gbps: float | None = None) -> Classification:
    """bandwidth_gbps: the product's documented memory bandwidth; without it memory may always be the limiter. A unit
    that was not measured is never taken for idle."""
    shares = {"memory": memory_share(m, bandwidth_gbps), **{key: m.get(key) for key in ("mfma_busy", "valu_busy")}}
    reasons = [f"{LIMITERS[unit][1]} {share:.1f} %" for unit, share in shares.items() if share is not None]
    if shares["memory"] is not None and shares["memory"] > 100:
        reasons[0] += " of the bandwidth, which is not believed: the Infinity Cache served a part"
        shares["memory"] = None
    absent = [LIMITERS[unit][1] for unit, share in shares.items() if share is None]
    if absent:
        reasons.append(f"not known: {', '.join(absent)}")
    busy = [unit for unit, share in shares.items() if share is not None and share >= limits[LIMITERS[unit][0]]]
    if busy:
        _, limiter, bottleneck = LIMITERS[max(busy, key=lambda unit: shares[unit])]
        return Classification(bottleneck, limiter, tuple(reasons))
    if absent:
        return Classification("unknown", None, tuple(reasons))
    occupancy = m.get("achieved_occupancy")
    reasons.append("occupancy was not collected" if occupancy is None else f"occupancy {occupancy:.1f} %")
    low = occupancy is not None and occupancy < limits["amd_low_occupancy_pct"]
    return Classification("underutilized" if low else "latency", None, tuple(reasons))


def memory_share(m: Metrics, bandwidth_gbps: float | None) -> float | None:
    """Bytes past the L2 in the kernel's time, in percent of the bandwidth; None where one of them is unknown."""
    moved = [m.get(key) for key in ("memory_bytes_read", "memory_bytes_written")]
    if None in moved or not m.get("duration") or not bandwidth_gbps:
        return None
    return 100 * sum(moved) / (m["duration"] * 1e3 * bandwidth_gbps)


# --- rules: functions of the longest kernel's metrics, its class and the thresholds ----------------------------------


def scratch(m: Metrics, judged: Classification, limits: Limits) -> Iterator[Finding]:
    if m.get("scratch_bytes"):
        registers = m.get("vector_registers")
        known = [] if registers is None else [("vector_registers", registers, "register")]
        yield finding("amd_scratch", None, ("scratch_bytes", m["scratch_bytes"], "byte"), *known)


def low_occupancy(m: Metrics, judged: Classification, limits: Limits) -> Iterator[Finding]:
    occupancy = m.get("achieved_occupancy")
    few = occupancy is not None and occupancy < limits["amd_low_occupancy_pct"]
    if few and judged.bottleneck == "underutilized":
        yield finding("amd_low_occupancy", None, ("achieved_occupancy", occupancy, "%"))


def vector_bound_product(m: Metrics, judged: Classification, limits: Limits) -> Iterator[Finding]:
    if m.get("mfma_instructions") and judged.limiter == LIMITERS["valu_busy"][1] and m.get("mfma_busy") is not None:
        evidence = [("valu_busy", m["valu_busy"], "%"), ("mfma_busy", m["mfma_busy"], "%")]
        yield finding("amd_vector_bound_product", None, *evidence)


RULES = (scratch, low_occupancy, vector_bound_product)
