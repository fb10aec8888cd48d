"""The section of the explorations: a plot and a table for each. Pure."""

from collections.abc import Iterator

from ..session.explorations import AtWorkload, Exploration, ExploredKernel
from . import phrases, plots
from .document import Facts, Figure, Fold, Table, Text, shown
from .gather import Session

KEY = "● in the lead, □ dropped as slower, × wrong or failed, at the foot"
HEAD = (
    "place",
    "candidate",
    "status",
    "latency",
    "speed-up",
    "registers",
    "spilled, bytes",
    "shared, bytes",
    "occupancy",
    "sustained",
)
MOST_ERROR = 400  # characters of an error in the table of failures


def explorations(session: Session) -> Iterator:
    """The latest exploration open, the others behind a line each."""
    *earlier, latest = session.explorations
    yield from one_exploration(latest)
    for exploration in reversed(earlier):
        yield Fold(title(exploration), list(one_exploration(exploration)))


def title(exploration: Exploration) -> str:
    right = [row for row in exploration.candidates if row.is_right]
    return f"{exploration.name}: {len(right)} of {len(exploration.candidates)} candidates right"


def one_exploration(exploration: Exploration) -> Iterator:
    file = f"explore/{exploration.name}.json"
    yield Facts(
        [
            ("Exploration", f"{title(exploration)}; a plan cites a row as {file}#NAME"),
            ("On", f"{exploration.device}, {exploration.tried_on}, {exploration.timestamp}"),
        ]
    )
    timed = [row for row in exploration.rows if row.median_us is not None]
    if timed:
        chart = plots.exploration(marks(exploration), opponents(exploration), exploration.name)
        yield Figure(chart, caption(exploration))
    else:
        yield Text("Nothing was timed.", "note")
    places = {row.name: str(place) for place, row in enumerate(exploration.candidates, 1)}
    yield Table(HEAD, [cells(row, places.get(row.name, unchecked(row))) for row in exploration.rows])
    if others := exploration.workloads[1:]:
        tried = [row for row in exploration.rows if row.others]
        yield Table(
            ("candidate", exploration.workload, *others, "mean speed-up"), [by_workload(row, others) for row in tried]
        )
    if failed := [row for row in exploration.rows if row.error]:
        yield Table(("failed", "status", "first error"), [(row.name, row.status, error(row)) for row in failed])


def unchecked(row: ExploredKernel) -> str:
    return "probe" if row.is_probe else "opponent"


def caption(exploration: Exploration) -> str:
    first = next((row.name for row in exploration.candidates if row.median_us is not None), None)
    leader = f"1 is {first}. " if first else ""
    return (
        f"Candidates best first, by their place in the table. {leader}Median of cold calls, p20 to p80 as a bar. "
        f"{KEY}. Lines are opponents and probes. The gate decides; these times only rank."
    )


def marks(exploration: Exploration) -> list[plots.Mark]:
    """A mark for each candidate, its place on the axis counted from 0."""
    return [mark(row, place) for place, row in enumerate(exploration.candidates)]


def mark(row: ExploredKernel, place: int) -> plots.Mark:
    kind = "rejected" if not row.is_right else "not judged" if row.dropped else "accepted"
    note = shown(f"{row.name}: {row.status}, {latency(row)}")
    first = place == 0 and row.median_us is not None
    return plots.Mark(str(place + 1), place, row.median_us, kind, note, row.p20_us, row.p80_us, best=first)


def opponents(exploration: Exploration) -> list[tuple[str, float]]:
    """(name, microseconds) of the opponents that were timed."""
    timed = [row for row in exploration.rows if row.is_opponent and row.median_us is not None]
    return [(shown(row.name), row.median_us) for row in timed]


def cells(row: ExploredKernel, place: str) -> tuple[str, ...]:
    state = f"{row.status}, dropped as slower" if row.dropped else row.status
    speedup = phrases.ratio(row.speedup, row.ci95) if row.speedup is not None and row.ci95 else ""
    counts = (row.registers, row.spill_bytes, row.shared_bytes)
    return (
        place,
        row.name,
        state,
        latency(row),
        speedup,
        *("" if count is None else f"{count:.0f}" for count in counts),
        "" if row.occupancy_pct is None else f"{row.occupancy_pct:.0f} %",
        sustained(row),
    )


def by_workload(row: ExploredKernel, others: list[str]) -> tuple[str, ...]:
    """The time and the speed-up of a row on the first workload and on these."""
    cells = [at_workload(one) if one else "" for one in (row, *map(row.others.get, others))]
    return (row.name, *cells, "" if row.mean is None else f"{row.mean:.3f}x")


def at_workload(one: ExploredKernel | AtWorkload) -> str:
    if one.median_us is None:
        return one.status or "not reached"
    speedup = "" if one.speedup is None else f", {one.speedup:.3f}x"
    return f"{one.median_us:.2f} us{speedup}{', dropped as slower' * one.dropped}"


def latency(row: ExploredKernel) -> str:
    if row.median_us is None:
        return "not timed"
    between = f" (p20 {row.p20_us:.2f} to p80 {row.p80_us:.2f})" if row.p20_us is not None and row.p80_us else ""
    return f"{row.median_us:.2f} us{between}"


def sustained(row: ExploredKernel) -> str:
    """The time of calls without a pause, and the SM clock meanwhile."""
    if row.sustained_us is None:
        return ""
    clock = "" if row.sm_clock_mhz is None else f" at {row.sm_clock_mhz:.0f} MHz"
    return f"{row.sustained_us:.2f} us{clock}"


def error(row: ExploredKernel) -> str:
    return row.error if len(row.error) <= MOST_ERROR else f"{row.error[:MOST_ERROR]}…"
