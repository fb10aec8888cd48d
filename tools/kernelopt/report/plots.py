"""The plots of a report: a chart is data, drawn as inline SVG.

The SVG has no colours. The page (reference/report.html) styles its classes, for light and dark.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 480, 300  # of the SVG's own coordinates; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 50, 126, 28, 40  # margins; names of lines stand in the right one
LINE_HEIGHT = 13  # two labels nearer than this would overlap
LOG_FROM = 8  # times between two latencies show better on a logarithmic axis than on one from 0
KINDS = ("accepted", "rejected", "not judged")  # of marks


@dataclass(frozen=True)
class Mark:
    """One version. value: None where it was not timed; then it stands at the foot of the plot. low, high: its
    interval."""

    name: str
    at: float
    value: float | None
    kind: str  # one of KINDS
    note: str
    low: float | None = None
    high: float | None = None
    best: bool = False


@dataclass(frozen=True)
class Line:
    """A limit or a course. name: written beside its end. kind: measured, documented, floor, target or best."""

    name: str
    kind: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Axis:
    """low to high, both above 0 when it is logarithmic. names: labels of the places 0, 1, 2 … in place of numbers."""

    label: str
    low: float
    high: float
    log: bool = False
    names: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The label, and the scale of its numbers."""
        return self.label if self.names else f"{self.label} ({'logarithmic' if self.log else 'linear'})"

    def share(self, value: float) -> float:
        """Where a value stands, from 0 (low) to 1 (high)."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """(value, label), as many as fit."""
        if self.names:
            step = math.ceil(len(self.names) / 10)
            return [(place, self.names[place]) for place in range(0, len(self.names), step)]
        values = log_ticks(self.low, self.high) if self.log else linear_ticks(self.high)
        return [(value, f"{value:g}") for value in values]


@dataclass(frozen=True)
class Chart:
    """name: of its file. All points of its lines lie within its axes."""

    name: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...]


def linear_ticks(high: float) -> list[float]:
    """0 and the multiples of 1, 2 or 5 times a power of ten up to `high`: three to seven."""
    power = 10 ** math.floor(math.log10(high))
    step = next(power * factor for factor in (0.2, 0.5, 1, 2) if high / (power * factor) <= 6)
    return [round(step * count, 10) for count in range(int(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between `low` and `high`; only the powers where that is too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    coarse = [float(f"1e{power}") for power in powers]
    for ticks in (fine, coarse):
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= 7:
            return inside
    return inside[:: math.ceil(len(inside) / 7)]


# --- the charts ---------------------------------------------------------------------------------------------


def versions_axis(marks: Sequence[Mark]) -> Axis:
    return Axis("version", -0.6, len(marks) - 0.4, names=tuple(mark.name for mark in marks))


def known(marks: Sequence[Mark]) -> list[Mark]:
    return [mark for mark in marks if mark.value is not None]


def trajectory(
    marks: Sequence[Mark], floor_us: float | None, target_us: float | None = None, by_library_rate: bool = False
) -> Chart:
    """Latency over versions (marks: `at` counts from 0), the course of the accepted ones, and the floor and the target
    where there are such; microseconds. by_library_rate: floor_us is at a library's rate, which is no floor."""
    limits = [limit for limit in (floor_us, target_us) if limit]
    values = [v for mark in known(marks) for v in (mark.value, mark.low, mark.high) if v is not None] + limits
    log = bool(values) and max(values) > LOG_FROM * min(values)
    low = min(values) / 1.3 if log else 0.0
    x = versions_axis(marks)
    floor_name = "library rate" if by_library_rate else "floor"
    lines = [Line(f"{floor_name} {floor_us:.4g} us", "floor", level(x, floor_us))] if floor_us else []
    if target_us:
        lines.append(Line(f"target {target_us:.4g} us", "target", level(x, target_us)))
    accepted = [mark for mark in known(marks) if mark.kind == "accepted"]
    if accepted:
        lines.append(Line("", "best", tuple(steps(accepted, x.high))))
    y = Axis("latency, us", low, max(values, default=1.0) * 1.15, log)
    return Chart("trajectory", "Latency of each version", x, y, tuple(lines), tuple(marks))


def steps(accepted: Sequence[Mark], end: float) -> list[tuple[float, float]]:
    """The course of the accepted versions: each holds until the next."""
    points: list[tuple[float, float]] = []
    for mark, until in zip(accepted, [*(mark.at for mark in accepted[1:]), end], strict=True):
        points += [(mark.at, mark.value), (until, mark.value)]
    return points


def exploration(marks: Sequence[Mark], opponents: Sequence[tuple[str, float]], name: str) -> Chart:
    """Latency of candidates, best first (marks: `at` counts from 0), and of opponents as lines (name, microseconds)."""
    values = [v for mark in known(marks) for v in (mark.value, mark.low, mark.high) if v is not None]
    values += [us for _, us in opponents]
    log = bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values)
    x = Axis("candidate, best first", -0.6, len(marks) - 0.4, names=tuple(mark.name for mark in marks))
    y = Axis("latency, us", min(values) / 1.3 if log else 0.0, max([*values, 1e-3]) * 1.15, log)
    lines = tuple(Line(shortened(f"{us:.4g} us {opponent}"), "documented", level(x, us)) for opponent, us in opponents)
    return Chart(f"exploration_{name}", f"Latency of the candidates of {name}", x, y, lines, tuple(marks))


def shortened(words: str, most: int = 18) -> str:
    """A name that fits into the right margin."""
    return words if len(words) <= most else f"{words[: most - 1]}…"


def level(x: Axis, value: float) -> tuple[tuple[float, float], ...]:
    return ((x.low, value), (x.high, value))


def bandwidth(marks: Sequence[Mark], roofs: Sequence[tuple[str, float]], target_gbps: float | None) -> Chart:
    """GB/s over versions, for a problem without FLOPs. roofs: (kind, GB/s)."""
    x = versions_axis(marks)
    lines = [Line(f"{kind} {gbps:.5g}", kind, level(x, gbps)) for kind, gbps in roofs]
    if target_gbps:
        lines.append(Line(f"target {target_gbps:.5g} GB/s", "target", level(x, target_gbps)))
    values = [*(mark.value for mark in known(marks)), *(line.points[0][1] for line in lines)]
    y = Axis("GB/s, least bytes over latency", 0.0, max(values) * 1.08)
    return Chart("bandwidth", "Bandwidth of each version", x, y, tuple(lines), tuple(marks))


def roofline(
    marks: Sequence[Mark], intensity: float, roofs: Sequence[tuple[str, float, float]], target: tuple[str, float] | None
) -> Chart:
    """Achieved TFLOPS over arithmetic intensity, FLOP/byte, both logarithmic. roofs: (kind, GB/s, TFLOPS). target:
    (name with its own unit, TFLOPS).

    marks: `at` is the intensity of the whole problem, so all versions stand above one another.
    """
    ridges = [1e3 * tflops / gbps for _, gbps, tflops in roofs]
    x = Axis("arithmetic intensity, FLOP/byte", min(intensity, *ridges) / 10, max(intensity, *ridges) * 10, log=True)
    reached = [mark.value for mark in known(marks)]
    attainable = [min(tflops, intensity * gbps / 1e3) for _, gbps, tflops in roofs]
    wanted = [target[1]] if target else []
    low = min(reached + attainable + wanted) / 3
    y = Axis("TFLOPS", low, max([*reached, *wanted, *(tflops for _, _, tflops in roofs)]) * 2, log=True)
    lines = []
    for (kind, gbps, tflops), ridge in zip(roofs, ridges, strict=True):
        start = max(x.low, 1e3 * low / gbps)
        points = ((start, start * gbps / 1e3), (ridge, tflops), (x.high, tflops))
        lines.append(Line(f"{kind} {tflops:.4g}", kind, points))
    if target:
        lines.append(Line(target[0], "target", level(x, target[1])))
    return Chart("roofline", "Roofline", x, y, tuple(lines), tuple(marks))


def named_marks(chart: Chart) -> list[tuple[Mark, str]]:
    """(mark, where its name stands: above, left or right of it). The best version always has one. Where versions
    have an axis that is all; else the first stands on the left, and on the right each that covers no other (marks
    have titles)."""
    marks = known(chart.marks)
    best, rest = [mark for mark in marks if mark.best], [mark for mark in marks if not mark.best]
    if chart.x.names:
        return [(mark, "above") for mark in best]
    last_first = rest[:0:-1]
    right: list[Mark] = []
    for mark in [*best, *sorted(last_first, key=lambda mark: mark.kind != "accepted")]:
        if all(abs(py(chart, mark.value) - py(chart, other.value)) >= LINE_HEIGHT for other in right):
            right.append(mark)
    return [*((mark, "left") for mark in rest[:1]), *((mark, "right") for mark in right)]


def mark_label(mark: Mark) -> str:
    return f"{mark.name} (best)" if mark.best else mark.name


# --- SVG ----------------------------------------------------------------------------------------------------------


def px(chart: Chart, value: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * chart.x.share(value), 1)


def py(chart: Chart, value: float) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * chart.y.share(value), 1)


def svg(chart: Chart) -> str:
    """The chart as one <svg> element, well-formed XML; one group of class `mark` a version."""
    title = html.escape(chart.title)
    return "\n".join(
        [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            *frame(chart),
            *(drawn_line(chart, line) for line in chart.lines),
            *line_names(chart),
            *(drawn_mark(chart, mark) for mark in chart.marks),
            *(mark_name(chart, mark, side) for mark, side in named_marks(chart)),
            "</svg>",
        ]
    )


def text(x: float, y: float, anchor: str, words: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(words)}</text>'


def frame(chart: Chart) -> list[str]:
    """Axes, grid, ticks, labels."""
    foot, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [text(2, 14, "start", chart.y.title), text(right, HEIGHT - 4, "end", chart.x.title)]
    for value, label in chart.y.ticks():
        y = py(chart, value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}"/>')
        parts.append(text(LEFT - 5, y + 4, "end", label))
    for value, label in chart.x.ticks():
        x = px(chart, value)
        parts.append(f'<line class="grid" x1="{x}" y1="{foot}" x2="{x}" y2="{foot + 4}"/>')
        parts.append(text(x, foot + 17, "middle", label))
    return [*parts, f'<path class="axis" d="M{LEFT} {TOP}V{foot}H{right}"/>']


def drawn_line(chart: Chart, line: Line) -> str:
    points = " ".join(f"{px(chart, x)},{py(chart, y)}" for x, y in line.points)
    return f'<polyline class="line {line.kind}" points="{points}"/>'


def line_names(chart: Chart) -> list[str]:
    """The names of the lines, right of their ends, moved apart where they would overlap."""
    named = sorted((line for line in chart.lines if line.name), key=lambda line: -line.points[-1][1])
    places = apart([py(chart, line.points[-1][1]) for line in named])
    return [
        text(WIDTH - RIGHT + 6, y + 4, "start", line.name, f"name {line.kind}")
        for y, line in zip(places, named, strict=True)
    ]


def apart(places: list[float]) -> list[float]:
    """Ascending places, each pushed down to at least LINE_HEIGHT below the one before."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + LINE_HEIGHT) if moved else place)
    return moved


def drawn_mark(chart: Chart, mark: Mark) -> str:
    x = px(chart, mark.at)
    y = HEIGHT - BOTTOM if mark.value is None else py(chart, mark.value)
    shapes = {
        "accepted": f'<circle cx="{x}" cy="{y}" r="4.5"/>',
        "rejected": f'<path d="M{x - 4} {y - 4}L{x + 4} {y + 4}M{x - 4} {y + 4}L{x + 4} {y - 4}"/>',
        "not judged": f'<rect x="{x - 4}" y="{y - 4}" width="8" height="8"/>',
    }
    whisker = ""
    if mark.low is not None and mark.high is not None:
        whisker = f'<path class="interval" d="M{x} {py(chart, mark.low)}V{py(chart, mark.high)}"/>'
    css = f"mark {mark.kind.replace(' ', '-')}"
    return f'<g class="{css}"><title>{html.escape(mark.note)}</title>{whisker}{shapes[mark.kind]}</g>'


def mark_name(chart: Chart, mark: Mark, side: str) -> str:
    x, y = px(chart, mark.at), py(chart, mark.value)
    top = y if mark.high is None else py(chart, mark.high)
    places = {
        "right": (x + 9, y + 4, "start"),
        "left": (x - 9, y + 4, "end"),
        "above": (x, round(top - 9, 1), "middle"),
    }
    return text(*places[side], mark_label(mark), "name version")
