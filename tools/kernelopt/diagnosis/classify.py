"""From metrics to the class of a bottleneck and its limiter. Pure functions.

A metric that was not collected is None and never counts as 0. With no metrics at all the class is `unknown`.

A unit limits when it is near its peak. Below that, warps that wait are the cause. Where no stall leads, or the leading
stall is a full queue, the busiest unit is the limiter.
"""

from ..profilers.profile import Metrics
from .case import ISSUE, PIPES, idle_share, stall_shares
from .diagnosis import Classification, Limits

# Full queues are a sign of a busy unit.
QUEUES = ("stall_mio_throttle", "stall_lg_throttle", "stall_math_pipe_throttle")


def classify(m: Metrics, limits: Limits) -> Classification:
    """The class of one kernel."""
    tensor, memory, sm = m.get("tensor_cycles"), m.get("memory_throughput"), m.get("sm_throughput")
    if memory is None or sm is None:
        absent = [key for key in ("sm_throughput", "memory_throughput") if m.get(key) is None]
        return judged("unknown", None, f"not collected: {', '.join(absent)}")
    if tensor is not None and (tensor >= limits["saturated_pct"] or tensor >= max(memory, limits["tensor_busy_pct"])):
        return judged("compute", "tensor pipe", f"tensor pipe active {tensor:.1f} % of cycles")
    unit, busiest_pct = memory_unit(m, limits), max(memory, sm)
    reasons = [f"memory throughput {memory:.1f} %" + (f" ({unit})" if unit else ""), f"SM throughput {sm:.1f} %"]
    if busiest_pct < limits["idle_pct"]:
        return idle_class(m, reasons, limits)
    if busiest_pct < limits["saturated_pct"]:
        if stall := leading_stall(m, limits):
            return waiting_class(m, stall, [*reasons, f"no unit is at {limits['saturated_pct']} % of its peak"])
        if abs(memory - sm) < limits["dominance_points"]:
            return judged("balanced", None, *reasons)
    if memory >= sm:
        return judged("memory", unit, *reasons, *described(m, {"dram_throughput": "dram", "l1_throughput": "l1"}))
    return compute_class(m, reasons)


def judged(bottleneck: str, limiter: str | None, *reasons: str) -> Classification:
    return Classification(bottleneck, limiter, reasons)


def idle_class(m: Metrics, reasons: list[str], limits: Limits) -> Classification:
    """Neither memory nor compute is busy: the kernel is too short, the grid is too small, or latency is not hidden."""
    duration = m.get("duration")
    if duration is not None and duration < limits["short_kernel_us"]:
        reason = f"{duration:.1f} us: the launch overhead is a large part of that"
        return judged("underutilized", "launch overhead", *reasons, reason)
    if (idle := idle_share(m, limits)) is not None:
        reason = f"{m['waves_per_sm']:.2f} waves per SM: the grid leaves {idle:.0%} of the GPU without work"
        return judged("underutilized", "small grid", *reasons, reason)
    if shares := stall_shares(m):
        return waiting_class(m, max(shares, key=shares.get), reasons)
    return judged("latency", None, *reasons, "warp stalls were not collected")


def waiting_class(m: Metrics, stall: str, reasons: list[str]) -> Classification:
    label = stall.removeprefix("stall_").replace("_", " ")
    return judged("latency", label, *reasons, f"{stall_shares(m)[stall]:.0f} % of warp latency is {label}")


def leading_stall(m: Metrics, limits: Limits) -> str | None:
    """The stall that takes most of the warp latency, if it dominates and takes more than full queues do."""
    shares = stall_shares(m)
    queues = sum(shares.pop(key, 0.0) for key in QUEUES)
    stall = max(shares, key=shares.get, default=None)
    return stall if stall and shares[stall] > max(limits["dominant_stall_pct"], queues) else None


def memory_unit(m: Metrics, limits: Limits) -> str | None:
    """dram, l1 or l2: the unit whose throughput is the memory throughput. None when no metric of them was collected.

    The memory throughput is the largest of many parts. Those of DRAM and the L1 are collected, those of the L2 are not.
    lts__throughput is not one of them, and only never below them: in a plain streaming kernel on an H200 it shows 92 %
    where no part of the L2 is above 61 %.
    """
    memory, dram, l2 = (m.get(key) for key in ("memory_throughput", "dram_throughput", "l2_throughput"))
    passes = m.get("lsu_wavefronts")  # over the L1, in percent of all cycles, as the memory throughput is
    throughputs = {"dram": dram, "l1": m.get("l1_throughput") if passes is None else passes}
    off = {unit: abs(value - memory) for unit, value in throughputs.items() if value is not None}
    nearest = min(off, key=off.get, default=None)
    if nearest and off[nearest] <= limits["same_points"]:
        return nearest
    return "l2" if l2 is not None and l2 >= memory - limits["same_points"] else nearest


def compute_class(m: Metrics, reasons: list[str]) -> Classification:
    """The busiest pipe, or the issue slots where they are busier than any pipe."""
    known = [key for key in PIPES if m.get(key) is not None]
    pipe, issue = max(known, key=lambda key: m[key], default=None), m.get("issue_active")
    if issue is not None and 100 * issue > (m[pipe] if pipe else 0):
        issued = f"instructions are issued in {100 * issue:.1f} % of cycles"
        return judged("compute", ISSUE, *reasons, issued, *described(m, PIPES)[:2])
    return judged("compute", PIPES.get(pipe), *reasons, *described(m, PIPES)[:3])


def described(m: Metrics, units: dict[str, str]) -> list[str]:
    known = sorted((key for key in units if m.get(key) is not None), key=lambda key: -m[key])
    return [f"{units[key]} {m[key]:.1f} %" for key in known]
