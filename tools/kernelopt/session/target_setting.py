"""The Stop Conditions that Step 0 sets, each a share of the attainable rate of a workload, and how they are written."""

from collections.abc import Mapping
from dataclasses import replace

from ..hardware import roofline
from ..hardware.roofline import TARGET_SHARE_PCT, Roof
from ..hardware.work import Work
from . import stop_conditions
from .task import Target
from .workspace import Workspace

RATES = ("tflops", "bandwidth_gbps")  # metrics of the resources, one of which bounds a workload


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


def set_target(workspace: Workspace, target: Target, sections: Mapping[str, str] | None = None) -> tuple[Target, ...]:
    """Write the target of what bounds its workload into the README, with other sections; return all targets.

    It replaces every rate of that workload: a rate of the other resource is stale, and no version might reach it. A
    latency and the targets of other workloads stay, as a person gave them."""
    task = workspace.task()
    others = [old for old in task.targets if old.workload != target.workload or old.metric not in RATES]
    targets = (target, *others)
    stop_lines = "\n".join(map(stop_conditions.stop_line, targets))
    workspace.update_readme(replace(task, targets=targets), {**(sections or {}), "Stop Conditions": stop_lines})
    return targets
