"""The Stop Conditions that Step 0 sets. Each one is a share of the attainable rate of a workload."""

from dataclasses import replace

from ..hardware import roofline
from ..hardware.roofline import TARGET_SHARE_PCT, Roof
from ..hardware.work import Work
from .task import Target


def of_roof(workload: str, work: Work, roof: Roof, share_pct: float = TARGET_SHARE_PCT) -> Target:
    """Set `share_pct` of the attainable rate of the resource that bounds the workload. For arithmetic that is the
    sustained rate, where it was measured: a version's recorded latency is of a warm card, too. That rate also decides
    whether memory bounds the workload."""
    sustained = replace(roof, compute=roof.sustained_compute or roof.compute)
    if roofline.bound(work.flops, work.bytes_min, sustained).bound == "compute":
        row, metric, unit = sustained.compute, "tflops", "TFLOPS"
    else:
        row, metric, unit = roof.bandwidth, "bandwidth_gbps", "GB/s"
    value = round(share_pct / 100 * row.value, 2)
    return Target(workload=workload, metric=metric, target=value, unit=unit, share_pct=share_pct, basis=row.citation)


def of_ceiling(ceiling_gbps: float, device: str, share_pct: float = TARGET_SHARE_PCT) -> Target:
    """Set a target for a default workload that cannot reach its memory-bound floor. The target is `share_pct` of the
    bandwidth of a kernel that only moves the problem's bytes on this GPU."""
    ceiling = significant(ceiling_gbps)
    return Target(
        workload="default",
        metric="bandwidth_gbps",
        target=significant(share_pct / 100 * ceiling),
        unit="GB/s",
        share_pct=share_pct,
        basis=f"ceiling of this problem: {ceiling} GB/s <- measure_ceiling.py, {device}",
    )


def significant(value: float) -> float:
    """The value to four significant digits: a small problem moves fewer bytes than 1 GB/s."""
    return float(f"{value:.4g}")
