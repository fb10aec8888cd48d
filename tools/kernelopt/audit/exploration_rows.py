"""Checks of the exploration rows that a plan cites. `explore/e3.json#name` must name a row of that file, which
explore/store.py writes; a row that shows a speed must be of a kernel that is right; and where the line has times or
speed-ups, one of them must be the row's."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..session import explorations
from ..session.explorations import CITED, Exploration, ExploredKernel
from .citations import Problem
from .units import Pattern, read_number

US = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3}
FIGURE = Pattern(
    r"(?<![\w.=\[-])(?:(?P<time>\d+(?:\.\d+)?)\s?(?P<unit>[nuµμm]s)\b|(?P<ratio>\d+\.\d+)\s?[x×](?!\w|\s?\d))"
)
# A difference, a goal or a bound: no time of a row.
NOT_BEFORE = Pattern(
    r"(?i)(?:\b(?:by|saves?|saved|within|under|below|above|over|than|from|against|vs\.?|instead of|up to|at (?:most|least)|"
    r"(?:floor|limit|target|goal|bound|ceiling)(?: (?:is|of|at))?)|[±<>≤≥]|\+/-)[\s:*~]*$"
)
NOT_AFTER = Pattern(
    r"(?i)[\s*]*(?:faster|slower|less|more|better|worse|sooner|later|ahead|behind|longer|shorter|saved|gained|lost|wanted)\b"
)
ROUNDED, MOST_ROUNDED = 0.01, 0.05  # largest relative difference of a figure; and of one with few digits


class Cited(NamedTuple):
    """A citation in a line. row: None where the exploration itself is cited. end: where it ends."""

    exploration: str
    row: str | None
    end: int


def problems(text: str, root: Path) -> Iterator[Problem]:
    """Yield a problem for each cited row that the workspace `root` does not have, whose kernel is wrong and the line
    does not say so, or of which the line has other figures."""
    read = {name: explorations.read(root, name) for name in {match["exploration"] for match in CITED.finditer(text)}}
    for number, line in enumerate(text.splitlines(), 1):
        found = list(citations(line, read))
        for at, cited in enumerate(found):
            start = cited.end if at else 0
            part = line[start : found[at + 1].end] if at + 1 < len(found) else line[start:]
            if message := wrong(cited, line, read) or other_figure(cited, part, found, read):
                yield Problem(number, "exploration", message)


def citations(line: str, read: dict[str, Exploration | None]) -> Iterator[Cited]:
    for match in CITED.finditer(line):
        name, row = match["exploration"], None
        if match["row"]:
            row = explorations.row_at(line, match.end(), read[name])
        yield Cited(name, row, match.end() + len(row or ""))


def wrong(cited: Cited, line: str, read: dict[str, Exploration | None]) -> str | None:
    """What is wrong with a citation in a line; None where it holds."""
    file, exploration = f"explore/{cited.exploration}.json", read[cited.exploration]
    if exploration is None:
        return f"there is no {file} that can be read; explore_kernels.py writes it"
    if cited.row is None:
        return None
    row = exploration.row(cited.row)
    if row is None:
        return f"{file} has no row '{cited.row}'"
    if row.is_right or row.status in line:
        return None
    return f"{file}#{row.name} is {row.status}, so it shows no speed; cite a row that is OK, or write {row.status} beside it"


def other_figure(cited: Cited, part: str, found: list[Cited], read: dict[str, Exploration | None]) -> str | None:
    """What is wrong with the times, or the speed-ups, beside a citation: none of them is of a row that the line cites.
    None where one is, and where there are none."""
    exploration = read[cited.exploration]
    row = exploration.row(cited.row) if cited.row else None
    if row is None or not row.is_right:
        return None
    rows = [other.row(one.row) for one in found if one.row and (other := read[one.exploration])]
    for is_time in (True, False):
        figures = list(figures_in(part, is_time))
        known = [value for one in rows if one for value in values(one, exploration, is_time)]
        if figures and not any(is_same(figure, value) for figure in figures for value in known):
            said = " and ".join(figure[0].strip() for figure in figures)
            return f"explore/{cited.exploration}.json#{row.name} {as_timed(row, exploration, is_time)}, and the line says {said}"
    return None


def figures_in(part: str, is_time: bool) -> Iterator[re.Match]:
    for match in FIGURE.finditer(part):
        if bool(match["time"]) == is_time and not (
            NOT_BEFORE.search(part, max(0, match.start() - 24), match.start()) or NOT_AFTER.match(part, match.end())
        ):
            yield match


def is_same(figure: re.Match, value: float) -> bool:
    """Is the figure that value, rounded?"""
    scale = US[figure["unit"]] if figure["time"] else 1.0
    number = read_number(figure["time"] or figure["ratio"])
    most = max(ROUNDED * value, min(scale * number.step, MOST_ROUNDED * value))
    return abs(scale * number.value - value) <= most


def values(row: ExploredKernel, exploration: Exploration, is_time: bool) -> list[float]:
    """The times of a row in microseconds, and those of the opponents, or its speed-ups over the other rows, on all
    workloads that it was tried on."""
    others = [other for other in exploration.rows if other.median_us]
    if is_time:
        own = [row.median_us, row.p20_us, row.p80_us, row.sustained_us]
        own += [other.median_us for other in others if other.is_opponent]
        at_others = [
            at.median_us for one in (row, *others) if one is row or one.is_opponent for at in one.others.values()
        ]
        return [value for value in (*own, *at_others) if value]
    known = [row.speedup, *(row.ci95 or ()), row.mean]
    known += [value for at in row.others.values() for value in (at.speedup, *(at.ci95 or ()))]
    if row.median_us:
        known += [
            ratio for other in others for ratio in (other.median_us / row.median_us, row.median_us / other.median_us)
        ]
    return [value for value in known if value]


def as_timed(row: ExploredKernel, exploration: Exploration, is_time: bool) -> str:
    if row.median_us is None:
        return f"was not timed on {exploration.device}"
    if is_time or row.speedup is None:
        return f"was timed at {row.median_us:.2f} us (p20 {row.p20_us:.2f}, p80 {row.p80_us:.2f})"
    return f"was timed at {row.speedup:.3f}x of {exploration.against}"
