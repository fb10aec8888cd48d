"""Hardware values in prose: which are citations that hold, and which are none. Pure functions of text and wiki pages.

A hardware value is written `<metric>: <value> <unit> <- <gpu-wiki>/<page>:L<line>`, a missing one
`<metric>: UNKNOWN (gpu-wiki not found)`. A figure with a hardware unit is right when its line cites it, or when a
program measured it (`Context.measured`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import wiki
from .units import (
    ANY_CASE,
    CLOCKS,
    COMPUTE_UNITS,
    EXACT,
    MULTIPROCESSORS,
    POWER,
    canonical,
    convertible,
    either,
    equal,
    number,
    table_of,
)
from .wiki import Page, Row

CAPACITIES = r"L1|L2|LDS|HBM\w*|VRAM|[Ii]nfinity [Cc]ache|register file|(?:device|GPU|global) memory"
PER_UNIT = (
    r"(?:32-bit )?(?:registers|threads|warps|blocks|wavefronts|waves)"
    r"(?: per | ?/ ?)(?:SM|CU|multiprocessor|compute unit)\b"
)
# A metric's own name, or its name in prose, before a bare number.
NAMED = (
    r"(?:memory_bandwidth|memory_capacity|l2_capacity|boost_clock|tdp|sm_count|cu_count|warp_size|peak_\w+|measured_\w+)\b"
    r"[`'\"]?\s*[:=]|\b(?:SM|CU) count\b[^\d\n]{0,8}|\bSMs\s*[:=]|\b(?:[Ww]arp|[Ww]avefront) size\b[^\d\n]{0,6}"
)

NUMBER = r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?"
CITATION = re.compile(
    r"(?P<metric>[A-Za-z_]\w*)\s*:\s*(?P<value>[^\s<]+)(?:[ \t]+(?P<unit>[^\s<]+))?[ \t]*<-[ \t]*"
    r"(?P<root>\S*?)/?(?P<page>docs/[^\s:`\"'()]+?\.md)(?::(?P<place>L?\d+|[#A-Za-z][\w-]*))?(?=[\s`\"',;.)|]|$)"
)
MISSING = re.compile(r"(?P<metric>[A-Za-z_]\w*): UNKNOWN \(gpu-wiki not found\)")
ARROW = re.compile(r"<-[^\n]*?(?:gpu-wiki|docs/\S*\.md)|UNKNOWN \(gpu-wiki|<gpu-wiki>/\S+")
_size = "KB|KiB|MB|MiB|GB|GiB"
FIGURE = re.compile(
    rf"(?P<number>{NUMBER})[ -]?(?P<unit>(?i:{either(ANY_CASE)})|{either((POWER, MULTIPROCESSORS, COMPUTE_UNITS))})"
    rf"(?![\w/]|-\w)"
    rf"|(?P<size>{NUMBER})[ -]?(?P<size_unit>{_size})(?:\)? (?:of )?)(?:{CAPACITIES})\b"
    rf"|\b(?:{CAPACITIES})\b[^.;|\n\d]{{0,25}}?(?P<size2>{NUMBER})[ -]?(?P<size_unit2>{_size})(?![\w/])"
    rf"|(?P<count>{NUMBER})(?P<count_unit> {PER_UNIT})"
    rf"|\b(?:{NAMED})\s*(?P<bare>\d[\d,]*(?:\.\d+)?)(?![\w.]*\w)"
)
HEDGE = re.compile(
    r"(?i)\b(?:approx(?:imately|\.)?|about|roughly|around|circa|nearly|almost|probably|presumably|likely|maybe|perhaps|"
    r"should be|should have|must be|believed to|similar to|comparable to|same as|typically|usually|i think|i believe|"
    r"estimated|estimate|assum\w+|guess\w*|ballpark|close to|in the order of|on the order of|expected to be|reportedly|"
    r"supposedly|apparently|as far as i know|from memory|iirc|if i recall|like (?:the|an?) [a-z]+\d+)\b|[~≈∼]"
)
HEDGE_AFTER = re.compile(
    r"(?i)^[^.;|\n]{0,12}\b(?:or so|or thereabouts|more or less|roughly|approximately|probably|i think|ish)\b"
)
LONG_WORD = re.compile(r"\S{1000,}")  # no citation, and the patterns would take seconds over it
HEDGE_REACH = 60  # characters before a figure
ROUNDED = 0.001  # how far a figure may be from a row of the wiki for that row to be proposed
ROUNDING = 0.01  # how far a measured figure in prose may be from the recorded number


@dataclass(frozen=True)
class Problem:
    """One value that is not as it must be. `fix`: (wrong text, right text) where only the line has moved."""

    line: int
    kind: str
    message: str
    fix: tuple[str, str] | None = None


@dataclass(frozen=True)
class Context:
    """What texts are held against. `product`: the workspace's platform, None where there is none; `measured`:
    (number, unit) that programs wrote (records, targets)."""

    pages: dict[str, Page] = field(repr=False)  # by path inside the wiki, limits too
    documents: dict[str, str] = field(repr=False)  # text of every page of the wiki, by path
    product: Page | None = None
    measured: frozenset[tuple[float, str]] = frozenset()
    roots: tuple[str, ...] = ("<gpu-wiki>", "gpu-wiki", "/tmp/gpu-wiki")

    def own(self) -> set[str]:
        """Pages that hold the platform's values."""
        pages = [self.product, self.product.limits] if self.product else []
        return {page.file for page in pages if page}


def audit(text: str, context: Context, prediction: bool = False) -> tuple[int, list[Problem]]:
    """(how many values were checked, problems) of a text.

    prediction: figures are what the author expects to measure, so that only the platform's own values need a citation.
    """
    checked, problems = 0, []
    for at, line in enumerate(text.splitlines(), 1):
        count, found = audit_line(line, context, prediction)
        checked += count
        problems += [Problem(at, *rest) for rest in found]
    return checked, problems


def audit_line(line: str, context: Context, prediction: bool) -> tuple[int, list[tuple]]:
    line = LONG_WORD.sub(lambda match: " " * len(match[0]), line)
    citations = list(CITATION.finditer(line))
    missing = list(MISSING.finditer(line))
    found: list[tuple] = []
    for match in citations:
        problem = check_citation(match, context)
        found += [problem] if problem else []
        found += hedged(line, match, match["metric"])
    for match in missing:
        row = context.product.known(match["metric"]) if context.product else None
        if row:
            found.append(("known", f"the wiki holds it: {row.citation}"))
    rest = blank(line, [*citations, *missing])
    for match in ARROW.finditer(rest):
        found += malformed(match[0], context)
    figures = list(hardware_figures(rest))
    for match, value, unit in figures:
        found += check_figure(match, value, unit, line, citations, context, prediction)
    return len(citations) + len(missing) + len(figures), found


def blank(line: str, matches: list) -> str:
    """The line with the matches replaced by spaces, so that columns stay."""
    for match in matches:
        line = line[: match.start()] + " " * (match.end() - match.start()) + line[match.end() :]
    return line


def check_citation(match: re.Match, context: Context) -> tuple | None:
    """(kind, message[, fix]) when page, line, metric, value or unit do not hold; None when they do."""
    metric, page_name, place = match["metric"], match["page"], match["place"]
    if match["root"].strip("`\"'") not in context.roots:
        return "malformed", f"'{match['root']}' is no gpu-wiki; write <gpu-wiki>/{page_name}"
    if page_name not in context.documents:
        return "no page", f"{page_name} is not in the wiki"
    page = context.pages.get(page_name)
    if page is None:
        return "no value", f"{page_name} holds no hardware values"
    if context.product and page_name not in context.own():
        return "foreign", f"{page_name} is the page of {page.platform}, the task is for {context.product.platform}"
    row = page.rows.get(metric)
    if row is None:
        return "no metric", f"{page_name} has no {metric}; it has: {', '.join(page.rows)}"
    if problem := check_value(match, row):
        return problem
    if place is None:
        return "malformed", f"{metric} is cited without a line; write: {row.citation}"
    if not place.removeprefix("L").isdigit():
        return check_section(place, page_name, context)
    if int(place.removeprefix("L")) != row.line:
        cited = f"{page_name}:{place}"
        return "moved", f"{metric} stands on line {row.line}, not {place}", (cited, f"{page_name}:L{row.line}")
    return None


def check_section(place: str, page_name: str, context: Context) -> tuple | None:
    """A citation may name a heading of the page in place of the line, as its first word or as a link does."""
    headings = re.findall(r"^#+ (.+)$", context.documents[page_name], re.MULTILINE)
    wanted = wiki.normalised(place)
    if any(wiki.normalised(heading).startswith(wanted) for heading in headings):
        return None
    return "no section", f"{page_name} has no section '{place}'; cite the line"


def check_value(match: re.Match, row: Row) -> tuple | None:
    if not row.known:  # what the hardware lacks may be cited, what the wiki lacks may not
        if match["value"] == row.text == "UNSUPPORTED":
            return None
        return "wrong value", f"the wiki has {row.metric} as {row.text}; write: {row.citation}"
    unit = None if match["unit"] in (None, "-") else match["unit"]
    if isinstance(row.value, str):
        return None if match["value"] == row.text else ("wrong value", f"the wiki says: {row.citation}")
    given = number(match["value"])
    if given is None:
        return "wrong value", f"'{match['value']}' is no number; the wiki says: {row.citation}"
    if (unit is None) != (row.unit == "-"):
        return "wrong unit", f"the wiki says: {row.citation}"
    if unit is not None and not convertible(unit, row.unit):
        return "wrong unit", f"'{unit}' is no unit of {row.metric}; the wiki says: {row.citation}"
    same = given == row.value if unit is None else equal(given, unit, row.value, row.unit)
    if not same:
        return "wrong value", f"the wiki says: {row.citation}"
    return None


def malformed(text: str, context: Context) -> list[tuple]:
    """What looks like a citation and is none; a plain mention of a page needs only the page."""
    mention = re.fullmatch(r"<gpu-wiki>/(docs/[^\s:`\"'()]+\.md|README\.md)(?::L?(\d+))?[\s`\"',;.)|]*", text)
    if mention is None:
        return [("malformed", "no citation of the form <metric>: <value> <unit> <- <gpu-wiki>/<page>:L<line>")]
    page, line = mention[1], mention[2]
    if page not in context.documents:
        return [("no page", f"{page} is not in the wiki")]
    if line and int(line) > len(context.documents[page].splitlines()):
        return [("no page", f"{page} has no line {line}")]
    return []


def hardware_figures(line: str) -> Iterator[tuple[re.Match, float, str]]:
    """(match, number, unit) of each figure with a hardware unit."""
    for match in FIGURE.finditer(line):
        text = match["number"] or match["size"] or match["size2"] or match["count"] or match["bare"]
        unit = match["unit"] or match["size_unit"] or match["size_unit2"] or ""
        if match["count"]:  # "threads" of "threads per SM"
            unit = re.search(r"[a-z]{5,}", match["count_unit"])[0]
        yield match, number(text), canonical(unit)


def check_figure(
    match, value: float, unit: str, line: str, citations: list, context: Context, prediction: bool
) -> list[tuple]:
    """Problems of a figure outside citations: nothing holds it, or it is hedged."""
    if any(figure_equals(value, unit, cited) for cited in citations):
        return []
    text = match[0].strip()
    known = bool(rows_with(value, unit, context.product))
    if match["count"] and not any(rows_with(value, unit, page) for page in context.pages.values()):
        return []  # so many blocks or warps an SM are a launch's own; only what some GPU has as a limit is a hardware value
    own_settings = table_of(unit) in (CLOCKS, POWER)  # a clock that was measured may well be the highest one
    recorded = is_measured(value, unit, context.measured) and (own_settings or not known)
    if recorded or (prediction and not known):
        return []
    near = [row.citation for row in rows_with(value, unit, context.product, ROUNDED)]  # dtypes share a peak
    hint = f"write: {', or: '.join(near)}" if near else "cite the wiki, or take it from a record"
    return [("uncited", f"'{text}' is no citation and no program recorded it; {hint}"), *hedged(line, match, text)]


def hedged(line: str, match: re.Match, what: str) -> list[tuple]:
    """A hedge beside a value: what is cited is exact."""
    before = line[max(0, match.start() - HEDGE_REACH) : match.start()]
    before = re.split(r"[.;|](?:\s|$)", before)[-1]
    found = HEDGE.search(before) or HEDGE_AFTER.search(line[match.end() :]) or HEDGE.search(match[0])
    return [("hedge", f"'{found[0].strip()}' beside {what}: a hardware value is exact or UNKNOWN")] if found else []


def figure_equals(value: float, unit: str, cited: re.Match) -> bool:
    """Does a citation of the same line say this figure?"""
    given = number(cited["value"])
    if given is None or cited["unit"] is None or not convertible(unit, cited["unit"]):
        return False
    return equal(value, unit, given, cited["unit"])


def rows_with(value: float, unit: str, product: Page | None, within: float = EXACT) -> list[Row]:
    """The product's rows that hold this figure."""
    return [
        row
        for row in (product.all_rows().values() if product else ())
        if isinstance(row.value, int | float)
        and convertible(unit, row.unit)
        and equal(value, unit, row.value, row.unit, within)
    ]


def is_measured(value: float, unit: str, measured: frozenset[tuple[float, str]]) -> bool:
    """Did a program write this figure, in this unit or a multiple of it, rounded as prose rounds?"""
    table = table_of(unit) or {unit: 1.0}
    return any(
        other_unit in table
        and abs(value * table[unit] - other * table[other_unit]) <= ROUNDING * other * table[other_unit]
        for other, other_unit in measured
    )
