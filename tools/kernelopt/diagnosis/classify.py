"""From counters to what limits a kernel, and what to try (findings.py). Pure functions.

Input is a profile: {kernels: [{name, duration_us, metrics}], work: {flops, bytes_min, dtype} or None}. A metric that
was not collected is None and never counts as 0; with no counters at all the classification is `unknown`.

A unit limits when it is near its peak. Below that, warps that wait are the cause; only where they wait for nothing in particular, or
for a full queue, is the busiest unit named all the same.
"""

import re

from ..profilers import metrics
from . import findings
from .findings import ISSUE, PIPES, idle_share, stall_shares

QUEUES = ("stall_mio_throttle", "stall_lg_throttle", "stall_math_pipe_throttle")  # full ones are a busy unit's mark


def analyse(profile: dict, limits: dict[str, float], floor: dict | None = None) -> dict:
    """{kernels, classification, metrics, missing_metrics, architecture, not_on_architecture, findings, second_opinion,
    warnings} of a profile; findings best first; second_opinion: what NVIDIA's own rules say of the longest kernel.

    missing_metrics: asked for, and did not come. not_on_architecture: those that no GPU of this architecture ("sm_90")
    has, which is no lost evidence; [] where the architecture is None, unknown.
    limits: the thresholds (metrics.thresholds). floor: {share_pct, bound} of the call, None unknown.
    """
    kernels = shares(profile["kernels"])
    main = longest(kernels)
    judgements = [classify(kernel["metrics"], limits) for kernel in kernels]
    of_main = judgements[kernels.index(main)]
    case = findings.Case(kernels, main, profile.get("work"), of_main, floor, limits)
    absent = {key for kernel in kernels for key, value in kernel["metrics"].items() if value is None}
    capability = metrics.capability(main["metrics"])
    elsewhere = metrics.not_on(capability)
    return {
        "kernels": [
            {
                "name": kernel["name"],
                "share_pct": kernel["share_pct"],
                "duration_us": kernel["duration_us"],
                **{name: value for name, value in of_kernel.items() if name != "reasons"},
            }
            for kernel, of_kernel in zip(kernels, judgements, strict=True)
        ],
        "classification": {"of": main["name"], **of_main},
        "metrics": main["metrics"],
        "missing_metrics": sorted(absent - elsewhere),
        "architecture": capability and f"sm_{capability.replace('.', '')}",
        "not_on_architecture": sorted(absent & elsewhere),
        "findings": findings.of(case),
        "second_opinion": main.get("rules", []),
        "warnings": warnings(kernels, main),
    }


# What a report of the wrong launch holds: torch's random numbers, fills and copies, and the trials of an autotuner.
BYSTANDERS = re.compile(r"distribution_\w*kernel|FillFunctor|copy_kernel|elementwise_kernel_with_index|[Mm]em(cpy|set)")


def warnings(kernels: list[dict], main: dict) -> list[str]:
    """Why this report may not be what it is taken for. Pure."""
    said = []
    if BYSTANDERS.search(main["name"]):
        said.append(
            f"the longest kernel, {main['name'][:60]}, makes, fills or copies data: is this the kernel that was meant?"
        )
    odd = [key for key, value in main["metrics"].items() if key.endswith("_throughput") and value and value > 105]
    if odd:
        said.append(f"above 100 % of a peak: {', '.join(odd)}; the passes of the profiler saw different runs")
    names = [kernel["name"] for kernel in kernels]
    if len(names) > len(set(names)):
        said.append(
            "one kernel appears several times: launches of several calls, or an autotuner's trials, count together"
        )
    return said


def shares(kernels: list[dict]) -> list[dict]:
    """Kernels with their share of the call's GPU time; None where a duration is unknown."""
    times = [kernel["duration_us"] for kernel in kernels]
    total = sum(times) if all(time is not None for time in times) else None
    return [{**k, "share_pct": 100 * k["duration_us"] / total if total else None} for k in kernels]


def longest(kernels: list[dict]) -> dict:
    return max(kernels, key=lambda kernel: kernel["duration_us"] or 0)


# --- class and limiter --------------------------------------------------------------------------------------------


def classify(m: dict, limits: dict) -> dict:
    """{class, limiter, reasons} of one kernel."""
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
        if stall := awaited(m, limits):
            return waiting_class(m, stall, [*reasons, f"no unit is at {limits['saturated_pct']} % of its peak"])
        if abs(memory - sm) < limits["dominance_points"]:
            return judged("balanced", None, *reasons)
    if memory >= sm:
        return judged("memory", unit, *reasons, *described(m, {"dram_throughput": "dram", "l1_throughput": "l1"}))
    return compute_class(m, reasons)


def judged(class_: str, limiter: str | None, *reasons: str) -> dict:
    return {"class": class_, "limiter": limiter, "reasons": list(reasons)}


def idle_class(m: dict, reasons: list[str], limits: dict) -> dict:
    """Neither memory nor compute is busy: is the call too short, is the GPU not filled, or is latency not hidden?"""
    duration = m.get("duration")
    if duration is not None and duration < limits["short_kernel_us"]:
        reason = f"{duration:.1f} us: starting and ending the launch is a good part of that"
        return judged("underutilized", "launch overhead", *reasons, reason)
    if (idle := idle_share(m, limits)) is not None:
        reason = f"{m['waves_per_sm']:.2f} waves per SM: the grid leaves {idle:.0%} of the GPU without work"
        return judged("underutilized", "small grid", *reasons, reason)
    found = stall_shares(m)
    if found:
        return waiting_class(m, max(found, key=found.get), reasons)
    return judged("latency", None, *reasons, "warp stalls were not collected")


def waiting_class(m: dict, stall: str, reasons: list[str]) -> dict:
    label = stall.removeprefix("stall_").replace("_", " ")
    return judged("latency", label, *reasons, f"{stall_shares(m)[stall]:.0f} % of warp latency is {label}")


def awaited(m: dict, limits: dict) -> str | None:
    """The stall that takes most of the warps' time, if it takes much of it, and more than full queues do."""
    found = stall_shares(m)
    queues = sum(found.pop(key, 0.0) for key in QUEUES)
    stall = max(found, key=found.get, default=None)
    return stall if stall and found[stall] > max(limits["dominant_stall_pct"], queues) else None


def memory_unit(m: dict, limits: dict) -> str | None:
    """dram, l1 or l2: the unit that the memory throughput is of. None when none of their figures was collected.

    It is the largest of many parts: DRAM's and the L1's are collected, those of the L2 are not. lts__throughput is none of
    them, only never below them: in a plain streaming kernel on an H200 it shows 92 % where no part of the L2 is above 61 %.
    """
    memory, dram, l2 = (m.get(key) for key in ("memory_throughput", "dram_throughput", "l2_throughput"))
    passes = m.get("lsu_wavefronts")  # over the L1, in percent of all cycles, as the memory throughput is
    own = {"dram": dram, "l1": m.get("l1_throughput") if passes is None else passes}
    off = {unit: abs(value - memory) for unit, value in own.items() if value is not None}
    nearest = min(off, key=off.get, default=None)
    if nearest and off[nearest] <= limits["same_points"]:
        return nearest
    return "l2" if l2 is not None and l2 >= memory - limits["same_points"] else nearest


def compute_class(m: dict, reasons: list[str]) -> dict:
    """Which pipe, or the issue slots where they are busier than any pipe."""
    known = [key for key in PIPES if m.get(key) is not None]
    pipe, issue = max(known, key=lambda key: m[key], default=None), m.get("issue_active")
    if issue is not None and 100 * issue > (m[pipe] if pipe else 0):
        issued = f"instructions are issued in {100 * issue:.1f} % of cycles"
        return judged("compute", ISSUE, *reasons, issued, *described(m, PIPES)[:2])
    return judged("compute", PIPES.get(pipe), *reasons, *described(m, PIPES)[:3])


def described(m: dict, units: dict) -> list[str]:
    known = sorted((key for key in units if m.get(key) is not None), key=lambda key: -m[key])
    return [f"{units[key]} {m[key]:.1f} %" for key in known]
