"""Take a profile of one version in one of four modes.

| mode | collects |
|---|---|
| annotation | metrics, roofline |
| ncu | all sections, NVIDIA's rules, metrics by instruction and source line |
| event | the time of each stage |
| nsys | the timeline: gaps, overlap, the host's calls |
"""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import bundle
from ..device import gpu_watch
from ..device.outcomes import Outcome
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks, Refused
from ..hardware import occupancy, wiki
from ..session import record_store
from ..session.digests import digest
from . import metrics, ncu, ncu_source, nsys, timeline, torch_trace
from .profile import KernelProfile, Params, Profile

MODES = ("annotation", "event", "ncu", "nsys")
HOTSPOTS = 12  # source lines a kernel in hotspots.json and the report


@dataclass(frozen=True)
class Call:
    """One call of a kernel's file on a case of its inputs, and the settings.

    inputs: the file of the case. product: the page of its GPU, if known.
    """

    kernel: Path
    version: str
    workload: str
    inputs: str
    shapes: list[list[int]]
    dtype: str
    cache: str
    timeout_s: float
    product: wiki.Page | None = None


def take(mode: str, sandbox: Sandbox, call: Call, folder: Path, work: dict | None) -> tuple[Profile, str | None]:
    """(profile, why metrics are missing) of a mode. All files except reports go to `folder`.

    annotation and ncu give kernels with metrics, event and nsys a timeline. Without the permission to read performance
    counters the first two give durations and resources, and every metric is None.
    """
    if mode in ("event", "nsys"):
        return _timeline(mode, sandbox, call, folder), None
    try:
        return _metrics(mode == "ncu", sandbox, call, folder, work), None
    except EnvironmentLacks as lack:
        profile = _timeline("event", sandbox, call, folder)
        kernels = tuple(without_metrics(stage, call.product) for stage in profile.timeline.stages)
        return Profile(kernels, work, replace(profile.params, counters="unavailable")), str(lack)


def _metrics(everything: bool, sandbox: Sandbox, call: Call, folder: Path, work: dict | None) -> Profile:
    report = folder / "report.ncu-rep"
    compiled = folder / "compiled" if everything else None
    with gpu_watch.Watch() as watch:
        outcome = ncu.collect(
            sandbox, call.kernel, call.inputs, report, call.cache, call.timeout_s, everything, compiled=compiled
        )
    params = settings(sandbox, call, outcome, watch, ncu.program_version())
    if everything:
        write_source(folder, ncu_source.read(report))
    return Profile(ncu.read(report), work, params)


def _timeline(mode: str, sandbox: Sandbox, call: Call, folder: Path) -> Profile:
    """event and nsys take the same calls. Where nsys writes no report, torch's profiler serves."""
    trace = None
    with gpu_watch.Watch() as watch:
        if mode == "nsys" and nsys.program():
            report = folder / "report.nsys-rep"
            outcome = nsys.collect(sandbox, call.kernel, call.inputs, report, call.timeout_s)
            trace = nsys.read(report) if report.exists() else None
        if trace is None:
            path = folder / "trace.json"
            outcome = torch_trace.collect(sandbox, call.kernel, call.inputs, path, call.timeout_s)
            trace = torch_trace.read(path)
    params = settings(sandbox, call, outcome, watch, trace.source)
    return Profile(params=params, timeline=timeline.analyse(trace))


def settings(sandbox: Sandbox, call: Call, outcome: Outcome, watch: gpu_watch.Watch, profiler: str) -> Params:
    state = watch.state(outcome.result["window"])
    return Params(
        version=call.version,
        kernel_sha256=digest(call.kernel),
        workload=call.workload,
        shapes=call.shapes,
        dtype=call.dtype,
        device=sandbox.device_name,
        driver=sandbox.gpu.driver,
        torch=outcome.result["torch"],
        profiler=profiler,
        cache=call.cache,
        clocks="as found, not locked",
        gpu_state=state and state.to_json(),
        triton=outcome.result["triton"],
        timestamp=record_store.now(),
        wall_s=outcome.wall_s,
    )


def without_metrics(stage: timeline.Stage, product: wiki.Page | None) -> KernelProfile:
    """A kernel whose metrics could not be read: its duration, its launch, and the occupancy of such a launch. Pure."""
    threads = stage.block and stage.block[0] * stage.block[1] * stage.block[2]
    blocks = stage.grid and stage.grid[0] * stage.grid[1] * stage.grid[2]
    known = {"duration": stage.us, "grid_size": blocks, "block_size": threads, "registers_per_thread": stage.registers}
    known["theoretical_occupancy"] = theoretical_occupancy(product, threads, stage.registers, stage.shared_bytes)
    capability = product and product.known("compute_capability")
    known |= metrics.of_capability(capability and capability.text)
    return KernelProfile(stage.name, stage.us, {metric.key: known.get(metric.key) for metric in metrics.schema()})


def theoretical_occupancy(
    product: wiki.Page | None, threads: int | None, registers: int | None, shared_bytes: int | None
) -> float | None:
    """In percent, by the limits of the product's compute capability; None where anything is unknown."""
    limits = product and product.limits
    if None in (limits, threads, registers, shared_bytes):
        return None
    try:
        return occupancy.occupancy(limits, threads, registers, shared_bytes).occupancy_pct
    except Refused:
        return None


def write_source(folder: Path, kernels: tuple[ncu_source.KernelSource, ...]) -> None:
    """hotspots.json, and per kernel its SASS and its source, each line behind its share of the samples."""
    hotspots = []
    for kernel in kernels:
        name = file_name(kernel.name)
        bundle.write_text(folder / "sass" / f"{name}.sass", ncu_source.annotated_sass(kernel))
        for file, text in ncu_source.annotated_source(kernel).items():
            bundle.write_text(folder / "source" / f"{name}-{Path(file).name}.txt", text)
        hottest = [asdict(line) for line in ncu_source.lines(kernel)[:HOTSPOTS]]
        hotspots.append({"kernel": kernel.name, "lines": hottest})
    bundle.write_json(folder / "hotspots.json", hotspots)


def read_hotspots(folder: Path) -> list[list[ncu_source.SourceLine]]:
    """The hottest lines of each kernel from hotspots.json, in launch order."""
    rows = bundle.read_json(folder / "hotspots.json")
    return [[ncu_source.SourceLine(**line) for line in row["lines"]] for row in rows]


def file_name(kernel: str) -> str:
    return re.sub(r"\W+", "_", kernel)[:60].strip("_")
