"""The profile of a model's step, measured or recorded, as a report."""

import gzip
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..device.sandbox import Sandbox
from ..errors import UsageError
from ..hardware import wiki
from ..hardware.roofline import LIBRARY_RATE
from ..hardware.work import ModuleWork
from ..session import platforms
from . import jobs, step_trace
from .advice import WAYS, advice
from .floors import floor_on
from .groups import Group
from .step_report import StepReport, WayTime, step_report, way_time

FORM = "kernelopt step 1"  # of a recorded file: a Chrome trace with one more key
SHOWN = 12  # groups, unless all are asked for
OPERATORS = 3  # of a group, in a line
WIDTHS = (5, 9, 6, 7, 10, 16)


@dataclass(frozen=True)
class Wanted:
    """workload: None for the model's default. ways: names in advice.WAYS. budget_s: for each of them.
    ready_s: how long each may take to compile."""

    model: Path
    workload: str | None
    training: bool
    ways: tuple[str, ...]
    budget_s: float
    ready_s: float
    timeout_s: float


@dataclass(frozen=True)
class Recording:
    """A profiled step as it is kept: facts (worker.model_profile.ProfiledStep, model, device, training) and events."""

    facts: dict
    events: list[dict]

    def save(self, path: Path) -> None:
        """A gzipped Chrome trace, which trace viewers open too."""
        content = {"kernelopt": {"form": FORM, **self.facts}, "traceEvents": self.events}
        bundle.write_bytes(path, gzip.compress(bundle.dumps(content).encode(), mtime=0))

    @classmethod
    def load(cls, path: Path) -> "Recording":
        """UsageError when the file is none."""
        try:
            content = bundle.loads(gzip.decompress(bundle.read_bytes(path)).decode())
            facts = content["kernelopt"]
            if facts.pop("form") != FORM:
                raise ValueError("another form")
            return cls(facts, content["traceEvents"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{path} is no recorded step; find_kernels.py --save FILE writes one") from None


def profile(sandbox: Sandbox, wanted: Wanted) -> Recording:
    """Run and profile a step."""
    ways = wanted.ways if sandbox.gpu else ()
    with sandbox.folder("profile") as folder:
        arguments = {
            "model": str(wanted.model.resolve()),
            "workload": wanted.workload,
            "training": wanted.training,
            "ways": [way for way in ways if not (wanted.training and "graph" in way)],
            "budget_s": wanted.budget_s,
            "ready_s": wanted.ready_s,
            "folder": folder,
        }
        done = jobs.run(sandbox, "profile_step", arguments, wanted.timeout_s)
        events = json.loads(gzip.decompress(Path(done.pop("trace")).read_bytes()))["traceEvents"]
    return Recording(
        {**done, "model": wanted.model.name, "device": sandbox.device_name, "training": wanted.training}, events
    )


def listed(path: Path) -> dict:
    """The groups of a step as JSON: of a recorded step, or as they stand in a file. UsageError when it is neither."""
    if path.suffix == ".gz":
        return report(Recording.load(path), "recorded").to_json()
    return bundle.read_json(path)


def report(recording: Recording, source: str) -> StepReport:
    """source: "measured" or "recorded"."""
    facts = recording.facts
    page = page_of(facts["device"])
    return step_report(
        step_trace.read(recording.events),
        [ModuleWork(**one) for one in facts["work"] or ()],
        floor_on(page, facts["parameter_bytes"]) if page else lambda _: None,
        model=facts["model"],
        workload=facts["workload"],
        training=facts["training"],
        device=facts["device"],
        torch=facts["torch"],
        source=source,
        parameters=facts["parameters"],
        step_us=statistics.median(facts["step_us"]),
        card=page.platform if page else None,
        ways=tuple(way_time(name, times) for name, times in facts["ways"].items()),
    )


def page_of(device: str) -> wiki.Page | None:
    return platforms.page_of(device, None)


def lines(result: StepReport, everything: bool) -> Iterator[str]:
    kind = "training step" if result.training else "step"
    yield (
        f"{result.model}, workload {result.workload}, {result.parameters} parameters: an eager {kind} takes "
        f"{ms(result.step_us)} on {result.device} ({result.source}, torch {result.torch})"
    )
    if result.on_gpu:
        idle = f"{result.idle_pct:.0f} % of the step"
        yield f"the GPU works for {ms(result.busy_us)} in {result.kernels} kernels, and waits for {idle}"
    for one in result.stretches:
        names = " to ".join(dict.fromkeys(name or "the model itself" for name in (one.first, one.last)))
        idle = f"{ms(one.us)}, idle for {one.idle_pct:.0f} %"
        yield f"launch-bound under the profiler: {one.kernels} kernels, {names}: {idle}"
    for way in result.ways:
        yield way_line(way)
    yield ""
    shown = result.groups if everything else result.groups[:SHOWN]
    yield from table(result, shown)
    if len(shown) < len(result.groups):
        yield f"{len(result.groups) - len(shown)} smaller groups are left out; --all shows them"
    yield ""
    yield from (f"{number}. {text}" for number, text in enumerate(advice(result), start=1))


def way_line(way: WayTime) -> str:
    if way.failed:
        return f"{WAYS[way.name]}: fails: {way.failed}"
    low, high = way.ci95
    return f"{WAYS[way.name]}: {ms(way.us)}, {way.verdict} {way.speedup:.2f}x (95 % interval {low:.2f} to {high:.2f})"


def table(result: StepReport, groups: tuple[Group, ...]) -> Iterator[str]:
    """A row a group."""
    units = ("GPU %", "kernels") if result.on_gpu else ("CPU %", "calls")
    head = ("group", "ms", *units, "floor ms", "saves at most")
    yield row(head, "module: operators")
    for group in groups:
        floor, saved = "-", "-"
        if group.floor:
            floor = f"{group.floor.us / 1000:.3f}{'*' if group.floor.library_rate else ''}"
            saved = f"{result.saved_us(group) / 1000:.3f}, {result.saved_pct(group):.1f} %"
        figures = (str(group.number), f"{group.us / 1000:.3f}", f"{group.share_pct:.1f}", str(group.kernels))
        yield row((*figures, floor, saved), f"{group.name}: {operators_text(group)}")
    if any(group.floor and group.floor.library_rate for group in groups):
        yield f"* {LIBRARY_RATE}"
    if result.card:
        yield f"floors: {result.card}'s rates in the wiki; savings: of the eager step, waiting for launches included"


def row(cells: tuple[str, ...], last: str) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)) + f"  {last}"


def operators_text(group: Group) -> str:
    parts = [f"{one.calls} {one.operator} {one.dtype} {one.shapes}".rstrip() for one in group.operators[:OPERATORS]]
    more = len(group.operators) - len(parts)
    return ", ".join(parts) + (f", {more} more" if more else "")


def ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.3f} ms"
