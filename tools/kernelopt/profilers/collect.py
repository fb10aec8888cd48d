"""Taking a profile of one version in one of four modes: what is collected and which files it leaves. I/O at its edges.

annotation: counters, roofline. ncu: all sections, NVIDIA's rules, counters by instruction and source line. event: the time of each
stage. nsys: the timeline, gaps, overlap, the host's calls.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..device import gpu
from ..device.sandbox import Outcome, Sandbox
from ..errors import EnvironmentLacks, Refused
from ..hardware import occupancy, wiki
from ..session import record_store
from ..session.workspace import digest
from . import metrics, ncu, ncu_source, nsys, timeline, torch_trace

MODES = ("annotation", "event", "ncu", "nsys")
HOTSPOTS = 12  # source lines a kernel in hotspots.json and the report


@dataclass(frozen=True)
class Call:
    """What is profiled: one call of a kernel's file on its inputs, and the settings."""

    kernel: Path
    version: str
    workload: str
    inputs: str  # the file that holds them
    shapes: list[list[int]]
    dtype: str
    cache: str
    timeout_s: float
    product: wiki.Page | None = None  # the page of its GPU, where it is known


def take(mode: str, sandbox: Sandbox, what: Call, folder: Path, work: dict | None) -> tuple[dict, str | None]:
    """(profile, why counters are missing) of a mode; its files but for the reports lie in `folder`.

    A profile is {kernels, work, params} and, of event and nsys, {timeline}. Without the right to read counters the two modes that
    need them give durations and resources, every counter None.
    """
    if mode in ("event", "nsys"):
        return _timeline(mode, sandbox, what, folder), None
    try:
        return _counters(mode == "ncu", sandbox, what, folder, work), None
    except EnvironmentLacks as lack:
        found = _timeline("event", sandbox, what, folder)
        kernels = [without_counters(stage, what.product) for stage in found["timeline"]["stages"]]
        return {"kernels": kernels, "work": work, "params": {**found["params"], "counters": "unavailable"}}, str(lack)


def _counters(everything: bool, sandbox: Sandbox, what: Call, folder: Path, work: dict | None) -> dict:
    report = folder / "report.ncu-rep"
    compiled = folder / "compiled" if everything else None
    with gpu.Watch() as watch:
        outcome = ncu.collect(
            sandbox, what.kernel, what.inputs, report, what.cache, what.timeout_s, everything, compiled=compiled
        )
    params = settings(sandbox, what, outcome, watch, ncu.program_version())
    if everything:
        write_source(folder, ncu_source.read(report))
    return {"kernels": ncu.read(report), "work": work, "params": params}


def _timeline(mode: str, sandbox: Sandbox, what: Call, folder: Path) -> dict:
    """event and nsys: the same calls, told as stages or as a timeline. Where nsys writes no report torch's profiler serves."""
    found = None
    with gpu.Watch() as watch:
        if mode == "nsys" and nsys.program():
            report = folder / "report.nsys-rep"
            outcome = nsys.collect(sandbox, what.kernel, what.inputs, report, what.timeout_s)
            found = nsys.read(report) if report.exists() else None
        if found is None:
            trace = folder / "trace.json"
            outcome = torch_trace.collect(sandbox, what.kernel, what.inputs, trace, what.timeout_s)
            found = torch_trace.read(trace)
    return {"timeline": timeline.analyse(found), "params": settings(sandbox, what, outcome, watch, found["source"])}


def settings(sandbox: Sandbox, what: Call, outcome: Outcome, watch: gpu.Watch, profiler: str) -> dict:
    """params.json: what was profiled, on what, how."""
    return {
        "version": what.version,
        "kernel_sha256": digest(what.kernel),
        "workload": what.workload,
        "shapes": what.shapes,
        "dtype": what.dtype,
        "device": sandbox.device_name,
        "driver": sandbox.gpu["driver"],
        "torch": outcome.result["torch"],
        "profiler": profiler,
        "cache": what.cache,
        "clocks": "as found, not locked",
        "gpu_state": watch.state(outcome.result["window"]),
        "triton": outcome.result["triton"],
        "timestamp": record_store.now(),
        "wall_s": outcome.wall_s,
    }


def without_counters(stage: dict, product: wiki.Page | None) -> dict:
    """A kernel whose counters could not be read: its duration, its launch, and the occupancy that these allow. Pure."""
    threads = stage["block"] and stage["block"][0] * stage["block"][1] * stage["block"][2]
    blocks = stage["grid"] and stage["grid"][0] * stage["grid"][1] * stage["grid"][2]
    known = {"duration": stage["us"], "grid_size": blocks, "block_size": threads}
    known["registers_per_thread"] = stage["registers"]
    known["theoretical_occupancy"] = theoretical_occupancy(product, threads, stage["registers"], stage["shared_bytes"])
    capability = product and product.known("compute_capability")
    known |= metrics.of_capability(capability and capability.text)
    values = {metric.key: known.get(metric.key) for metric in metrics.schema()}
    return {"name": stage["name"], "duration_us": stage["us"], "metrics": values, "rules": []}


def theoretical_occupancy(product: wiki.Page | None, threads, registers, shared_bytes) -> float | None:
    """In percent, by the limits of the product's compute capability; None where anything is unknown."""
    limits = product and product.limits
    if None in (limits, threads, registers, shared_bytes):
        return None
    try:
        return occupancy.occupancy(limits, threads, registers, shared_bytes)["occupancy_pct"]
    except Refused:
        return None


def write_source(folder: Path, kernels: list[dict]) -> None:
    """hotspots.json, and per kernel its SASS and its source, each line behind its share of the samples."""
    hotspots = []
    for kernel in kernels:
        name = file_name(kernel["name"])
        bundle.write_text(folder / "sass" / f"{name}.sass", ncu_source.annotated_sass(kernel))
        for file, text in ncu_source.annotated_source(kernel).items():
            bundle.write_text(folder / "source" / f"{name}-{Path(file).name}.txt", text)
        hotspots.append({"kernel": kernel["name"], "lines": ncu_source.lines(kernel)[:HOTSPOTS]})
    bundle.write_json(folder / "hotspots.json", hotspots)


def file_name(kernel: str) -> str:
    return re.sub(r"\W+", "_", kernel)[:60].strip("_")
