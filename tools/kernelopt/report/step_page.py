"""The page of a profiled step of a model. Pure."""

from collections.abc import Iterator

from ..models.advice import WAYS, advice
from ..models.finding import ms, operators_text
from ..models.groups import Group
from ..models.step_report import StepReport, WayTime
from .document import Facts, Page, Section, Table, Text


def page(report: StepReport) -> Page:
    subtitle = f"workload {report.workload} · {report.device} · torch {report.torch} · {report.source}"
    return Page(
        f"A step of {report.model}",
        subtitle,
        [
            Section("Advice", [Text(f"{number}. {text}") for number, text in enumerate(advice(report), start=1)]),
            Section("The step", list(step(report))),
            Section("Where the time goes", list(groups(report))),
        ],
    )


def step(report: StepReport) -> Iterator:
    facts = [("Eager step", ms(report.step_us)), ("Parameters", str(report.parameters))]
    if report.on_gpu:
        facts += [("GPU at work", ms(report.busy_us)), ("GPU waits", f"{report.idle_pct:.0f} % of the step")]
    yield Facts([*facts, ("Kernels" if report.on_gpu else "Operators of the CPU", str(report.kernels))])
    if report.ways:
        yield Table(("way of running", "step", "against eager", "verdict"), [way_row(way) for way in report.ways])
    if report.stretches:
        rows = [
            (one.first or "model", one.last or "model", str(one.kernels), ms(one.us), f"{one.idle_pct:.0f} %")
            for one in report.stretches
        ]
        yield Table(("launch-bound from", "to", "kernels", "time, under the profiler", "GPU idle"), rows)


def way_row(way: WayTime) -> tuple[str, ...]:
    if way.failed:
        return WAYS[way.name], "", "", f"fails: {way.failed}"
    low, high = way.ci95
    return WAYS[way.name], ms(way.us), f"{way.speedup:.2f}x ({low:.2f} to {high:.2f})", way.verdict


def groups(report: StepReport) -> Iterator:
    units = ("of the GPU's time", "kernels") if report.on_gpu else ("of the CPU operators' time", "calls")
    head = ("group", "module", "time", *units, "floor", "step saves at most", "operators")
    yield Table(head, [group_row(report, group) for group in report.groups])
    if report.card:
        yield Text(f"Floors: rates of {report.card} in the wiki. A group may be part of another one.", "note")


def group_row(report: StepReport, group: Group) -> tuple[str, ...]:
    floor, saved = "unknown", "unknown"
    if group.floor:
        floor = ms(group.floor.us) + (", a library's rate" if group.floor.library_rate else "")
        saved = f"{ms(report.saved_us(group))}, {report.saved_pct(group):.1f} %"
    times = ms(group.us), f"{group.share_pct:.1f} %"
    return str(group.number), group.name, *times, str(group.kernels), floor, saved, operators_text(group)
