"""A profile judged whole: its diagnosis, and how far the call is from its floor, by the recorded latency where there is one."""

import contextlib
from pathlib import Path

from .. import bundle
from ..errors import Refused, ToolError
from ..hardware import roofline
from ..hardware.work import Work
from ..profilers import metrics
from . import classify, speed_of_light

MOSTLY = 0.75  # of the least bytes: what reads so much and writes so little may get past a copy's rate (gpu-wiki, H200)
RATES = {  # what the floor of a problem is reckoned with, by the row of the wiki
    "measured_copy_bandwidth": "the copy rate",
    "memory_bandwidth": "the documented bandwidth",
}


def analysed(profile: dict, earlier: list[dict]) -> dict:
    """diagnosis.analyse of a profile (profile_report.load), and speed_of_light (sol.analyse), both with the floor
    where the work and the GPU are known. earlier: profiles of the versions before, oldest first."""
    limits, known = metrics.thresholds(), floor(profile)
    found = classify.analyse(profile, limits, known)
    before = [speed_of_light.efficiency_pct(classify.longest(p["kernels"])["metrics"]) for p in earlier]
    share, basis = (known["share_pct"], known["basis"]) if known else (None, "")
    past = [value for value in before if value is not None]
    return {**found, "speed_of_light": speed_of_light.analyse(found["metrics"], share, past, limits, basis)}


def floor(profile: dict) -> dict | None:
    """{share_pct, bound, basis}: floor over time of the call, memory or compute, and in words which rate and which time that
    takes. The time is the recorded latency (recorded_us), else that of all kernels under the profiler. None where the work,
    the GPU or the time is unknown."""
    work, product, recorded = profile.get("work"), profile.get("product"), profile.get("recorded_us")
    time_us = recorded or total_us(profile)
    if not work or not product or not time_us:
        return None
    try:
        roof = roofline.roof_for(product, Work.from_json(work))
    except Refused:
        return None
    utilization = roofline.utilization(time_us, work["flops"], work["bytes_min"], roof)
    clock = "by the recorded latency" if recorded else "by the profile's duration"
    return {
        "share_pct": utilization.floor_share_pct,
        "bound": utilization.bound,
        "basis": f"at {rate(roof, utilization.bound, work)}, {clock}",
    }


def total_us(profile: dict) -> float | None:
    """Time of all kernels of the call under the profiler; None where one is not known."""
    times = [kernel["duration_us"] for kernel in profile["kernels"]]
    return None if None in times else sum(times)


def rate(roof: roofline.Roof, bound: str, work: dict) -> str:
    """ "the copy rate (this problem mostly reads, which can be faster)". No figure: hardware values stand with a citation alone."""
    row = roof.bandwidth if bound == "memory" else roof.compute
    product = "a measured product's rate" if row.metric.startswith("measured") else "the documented peak"
    reads = bound == "memory" and (work.get("bytes_in") or 0) >= MOSTLY * work["bytes_min"]
    return RATES.get(row.metric, product) + " (this problem mostly reads, which can be faster)" * reads


def recorded_us(records: Path, params: dict | None) -> float | None:
    """The median latency in us that the folder `records` (W/memory) has of the very kernel, workload and GPU of a profile; None
    where there is none."""
    path = records / f"{params['version']}.json" if params else None
    if path is None or not path.is_file():
        return None
    with contextlib.suppress(ToolError, KeyError, TypeError):  # a record that cannot be read is none
        record = bundle.read_json(path)
        if record["kernel_sha256"] == params["kernel_sha256"] and record["device"] == params["device"]:
            return record["performance"]["latency_us_by_workload"].get(params["workload"])
    return None
