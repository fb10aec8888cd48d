"""The Stop Conditions that Step 0 sets: a share of the rate that a workload can attain."""

from ..hardware import roofline
from ..hardware.roofline import TARGET_SHARE_PCT, Roof
from ..hardware.work import Work
from .task import Target


def of_roof(workload: str, work: Work, roof: Roof, share_pct: float = TARGET_SHARE_PCT) -> Target:
    """`share_pct` of the attainable rate of whatever bounds the workload."""
    if roofline.bound(work.flops, work.bytes_min, roof).bound == "compute":
        row, metric, unit = roof.compute, "tflops", "TFLOPS"
    else:
        row, metric, unit = roof.bandwidth, "bandwidth_gbps", "GB/s"
    value = round(share_pct / 100 * row.value, 2)
    return Target(workload=workload, metric=metric, target=value, unit=unit, share_pct=share_pct, basis=row.citation)


def of_ceiling(ceiling_gbps: float, device: str, share_pct: float = TARGET_SHARE_PCT) -> Target:
    """For a default workload that cannot reach its memory-bound floor: `share_pct` of what this GPU's memory gave to a
    kernel that moves this problem's bytes and does no more."""
    ceiling = round(ceiling_gbps, 1)
    return Target(
        workload="default",
        metric="bandwidth_gbps",
        target=round(share_pct / 100 * ceiling, 2),
        unit="GB/s",
        share_pct=share_pct,
        basis=f"ceiling of this problem: {ceiling} GB/s <- measure_bandwidth_ceiling.py, {device}",
    )
