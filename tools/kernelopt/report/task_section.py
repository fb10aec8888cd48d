"""The sections of the task and of the plots. Pure."""

from collections.abc import Iterator

from ..hardware.work import Work
from ..session.record import Record
from ..session.task import Target
from . import phrases, plots
from .document import Citations, Code, Facts, Figure, Fold, Table, Text
from .gather import Session

KEY = "● accepted, × rejected, □ not judged"  # of the plots' marks


def asked_for(session: Session) -> Iterator:
    task = session.task
    rules = [name for name in ("libraries", "only_these_shapes") if getattr(task, name)]
    yield Facts(
        [
            ("Platform", task.platform or phrases.UNKNOWN),
            ("Architecture", task.arch or phrases.UNKNOWN),
            ("Framework", task.framework or phrases.UNKNOWN),
            ("dtype", task.dtype or "as the reference makes it"),
            ("Tolerance", "the default of the dtype" if task.tolerance is None else f"{task.tolerance:g}"),
            ("Allowed", ", ".join(rules) or "no libraries; other sizes and layouts are tried too"),
            ("Notes", task.additional_notes or "none"),
        ]
    )
    shapes, work = task.shapes or {}, task.work or {}
    if names := list(dict.fromkeys([*shapes, *work])):
        rows = [(name, shapes.get(name, phrases.UNKNOWN), *work_cells(work.get(name))) for name in names]
        yield Table(("workload", "shapes", "FLOPs", "least bytes", "dtype", "source"), rows)
    else:
        yield Text("Shapes and work are not counted yet (estimate_work.py --workspace W).", "note")
    for target in task.targets:
        yield Text(f"Target: {target.workload} {target.metric} {phrases.wanted(target)}, from")
        yield Citations([target.basis])
    yield Fold("reference.py: what is to be computed", [Code(session.reference, "python")])


def work_cells(work: Work | None) -> tuple[str, ...]:
    if work is None:
        return (phrases.UNKNOWN,) * 4
    return f"{work.flops:,}", f"{work.bytes_min:,}", work.dtype, work.source


def figures(session: Session) -> Iterator:
    if not session.visible:
        yield Text("No plot: nothing is recorded yet.", "note")
        return
    target = next((target for target in session.task.targets if target.workload == "default"), None)
    if session.roof is None:
        yield Text(f"No roofline: {session.no_roof}.", "note")
    else:
        yield from limits(session, target)
    marks = [mark(session, place, record, "latency_us") for place, record in enumerate(session.visible)]
    floors = [record.performance.floor_us for record in session.visible]
    floor = next((floor for floor in reversed(floors) if floor), None)
    yield Figure(
        plots.trajectory(marks, floor, limit(target, "latency_us"), phrases.by_library_rate(session)),
        f"Median of each version, p20 to p80 as a bar. {KEY}; at the foot: no latency recorded. Latencies of different "
        "times are no verdict: the paired ratios below are.",
    )


def limit(target: Target | None, metric: str) -> float | None:
    """A target of that metric, as a height on a plot of it."""
    return target.target if target and target.metric == metric else None


def mark(session: Session, place: float, record: Record, metric: str) -> plots.Mark:
    """A version on a plot; its interval only where the plot is of the latency."""
    performance = record.performance
    value = getattr(performance, metric)
    ends = (performance.p20_us, performance.p80_us) if metric == "latency_us" and value else (None, None)
    note = f"{record.version}: {phrases.latency(record)}, {phrases.verdict(record)}"
    is_best = session.best is not None and record.version == session.best.version
    return plots.Mark(record.version, place, value, phrases.verdict(record), note, *ends, best=is_best)


def limits(session: Session, target: Target | None) -> Iterator[Figure]:
    """The roofline, where the problem has FLOPs; the bandwidth of each version, where memory is the roof or the
    goal."""
    flops = session.task.work["default"].flops
    if flops:
        yield roofline_figure(session, target)
    if not flops or limit(target, "bandwidth_gbps"):
        why = "The goal is a bandwidth." if flops else "The problem has 0 FLOPs, so memory is its roof."
        pairs = phrases.roof_pairs(session.roof)
        marks = [mark(session, place, record, "bandwidth_gbps") for place, record in enumerate(session.visible)]
        roofs = [(kind, bandwidth.value) for kind, (bandwidth, _) in pairs]
        caption = f"{why} {roof_rows(pairs, 1)}. {KEY}; at the foot: no rate recorded."
        yield Figure(plots.bandwidth(marks, roofs, limit(target, "bandwidth_gbps")), caption)


def roofline_figure(session: Session, target: Target | None) -> Figure:
    work, pairs = session.task.work["default"], phrases.roof_pairs(session.roof)
    intensity = work.flops / work.bytes_min
    marks = [mark(session, intensity, record, "tflops") for record in session.visible]
    roofs = [(kind, bandwidth.value, compute.value) for kind, (bandwidth, compute) in pairs if compute]
    off = [m.name for m in marks if m.value is None]
    absent = f" Not on the plot, no rate recorded: {', '.join(off)}." if off else ""
    return Figure(
        plots.roofline(plots.known(marks), intensity, roofs, target_line(target, intensity)),
        f"FLOPs over least bytes of the whole problem: {intensity:.4g} FLOP/byte, the same for every version. "
        f"{roof_rows(pairs, 2)}. {KEY}.{absent}",
    )


def roof_rows(pairs: list[tuple[str, tuple]], count: int) -> str:
    """The first `count` rows of each roof."""
    roofs = ((kind, [row for row in rows[:count] if row]) for kind, rows in pairs)
    return "; ".join(f"{kind}: {', '.join(f'{r.metric} {r.text} {r.unit}' for r in rows)}" for kind, rows in roofs)


def target_line(target: Target | None, intensity: float) -> tuple[str, float] | None:
    """(name in the target's own unit, its height on the roofline in TFLOPS)."""
    if target is None or target.metric == "latency_us":
        return None
    tflops = target.target if target.metric == "tflops" else target.target * intensity / 1e3
    return f"target {target.target:.5g} {target.unit}", tflops
