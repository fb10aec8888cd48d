"""Citations of hardware values, and checks of them against wiki pages. All functions are pure.

A citation has the form `<metric>: <value> <unit> <- <gpu-wiki>/<page>:L<line>`. A value of the workspace's own
calibration ends with `<- <workspace>/calibration.md:L<line>`. A missing value is written `<metric>: UNKNOWN (gpu-wiki
not found)`.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..hardware import wiki
from ..hardware.wiki import Page, Row
from .units import WORDS, WORK, Pattern, canonical, convertible, equal, number
from .wording import QUANTITIES, pattern_of_names

CALIBRATION = "calibration.md"  # the page of the workspace's own card
CITATION = Pattern(
    r"(?P<metric>[A-Za-z_]\w*)\s*:\s*(?P<value>[^\s<]+)(?:[ \t]+(?P<unit>[^\s<]+))?[ \t]*<-[ \t]*"
    r"(?P<root>\S*?)/?(?P<page>docs/[^\s:`\"'()]+?\.md|calibration\.md)(?::(?P<place>L?\d+|[#A-Za-z][\w-]*))?(?=[\s`\"',;.)|]|$)"
)
MISSING = Pattern(r"(?P<metric>[A-Za-z_]\w*): UNKNOWN \(gpu-wiki not found\)")
ARROW = Pattern(
    r"<-[^\n]{0,300}?(?:gpu-wiki|docs/\S*\.md|calibration\.md)|UNKNOWN \(gpu-wiki|<gpu-wiki>/\S+|<workspace>/calibration\S*"
)
MENTION = Pattern(
    r"(?:<gpu-wiki>/(?P<page>docs/[^\s:`\"'()]+\.md|README\.md)|<workspace>/(?P<own>calibration\.md))(?::L?(?P<line>\d+))?[\s`\"',;.)|]*"
)
HEDGE = Pattern(
    r"(?i)(?P<hedge>\b(?:approx(?:imately|\.)?|about|roughly|around|circa|nearly|almost|probably|presumably|likely|maybe|perhaps|"
    r"should be|should have|must be|believed to|similar to|comparable to|same as|typically|usually|i think|i believe|"
    r"estimated|estimate|assum\w+|guess\w*|ballpark|close to|in the order of|on the order of|expected to be|reportedly|"
    r"supposedly|apparently|as far as i know|from memory|iirc|if i recall|like (?:the|an?) [a-z]+\d+)\b|[~≈∼])(?:\b[A-Za-z]\w*|[^\w.;|])*$"
)
PART = Pattern(rf"(?i)\b(?:half|thirds?|quarters?|tenths?|percent|twice|times|{'|'.join(WORDS)})\b")
HEDGE_AFTER = Pattern(
    r"(?i)^[^.;|\n\d]{0,12}\b(?P<hedge>or so|or thereabouts|more or less|roughly|approximately|probably|i think|ish)\b"
)
HEDGE_REACH = 60  # characters before a figure


class Fix(NamedTuple):
    """A replacement in a line. It applies at the given column, or anywhere in the line if the column is -1."""

    line: int
    column: int
    wrong: str
    right: str


@dataclass(frozen=True)
class Problem:
    """A wrong or uncited value, or a hint about a value."""

    line: int
    kind: str
    message: str
    fix: Fix | None = None


class Recorded(NamedTuple):
    """A value that a program wrote. of: bandwidth, compute, SM clock, memory clock or power; target for the figure
    of a Stop Condition."""

    value: float
    unit: str
    of: str


@dataclass
class Found:
    """The result of an audit: the number of checked values, the problems that block a gate, and the hints."""

    checked: int = 0
    problems: list[Problem] = field(default_factory=list)
    hints: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Context:
    """The values that texts are checked against. product: the workspace's platform, or None. measured: values that
    programs wrote to records and targets. devices: device names that programs wrote. ridges: the ridge points of the
    task's dtypes in FLOP/byte, as the tools print them."""

    pages: dict[str, Page] = field(repr=False)  # by path inside the wiki, limits too; the workspace's as CALIBRATION
    documents: dict[str, str] = field(repr=False)  # text of every page of the wiki, by path
    product: Page | None = None
    measured: frozenset[Recorded] = frozenset()
    roots: tuple[str, ...] = ("<gpu-wiki>", "gpu-wiki", "/tmp/gpu-wiki")
    devices: frozenset[str] = frozenset()
    ridges: tuple[float, ...] = ()

    @functools.cached_property
    def platform_pages(self) -> dict[str, Page]:
        """The pages that hold the platform's values."""
        product = [self.product, self.product.limits] if self.product else []
        return {page.file: page for page in (*product, self.pages.get(CALIBRATION)) if page}

    def is_common(self, row: Row) -> bool:
        """Return whether all pages of the vendor that have the metric hold the same value."""
        vendor = self.pages[row.page].vendor
        rows = [page.known(row.metric) for page in self.pages.values() if page.vendor == vendor]
        values = [other.text for other in rows if other]
        return len(values) > 1 and len(set(values)) == 1

    @functools.cached_property
    def rows(self) -> dict[str, list[Row]]:
        """The numeric rows of the platform, by quantity."""
        return by_quantity(self.platform_pages.values())

    @functools.cached_property
    def foreign(self) -> dict[str, list[Row]]:
        """The numeric rows of the other pages, by quantity. Without a platform, these are the rows of all pages.
        Rows that were measured on one card are left out."""
        foreign_rows = by_quantity(page for name, page in self.pages.items() if name not in self.platform_pages)
        return {name: [row for row in rows if "measured" not in row.metric] for name, rows in foreign_rows.items()}

    @functools.cached_property
    def names(self) -> Pattern | None:
        products = (page for name, page in self.pages.items() if "/limits/" not in name)
        aliases = {alias for page in products for alias in (page.platform, *page.aliases)}
        return pattern_of_names(aliases | self.devices)

    @functools.cached_property
    def recorded(self) -> dict[tuple[str, str], list[float]]:
        """The values that programs recorded, sorted, by their kind and unit."""
        values_by_kind: dict[tuple[str, str], list[float]] = {}
        for value, unit, of in self.measured:
            values_by_kind.setdefault((of, unit), []).append(value)
        return {key: sorted(values) for key, values in values_by_kind.items()}


def by_quantity(pages: Iterable[Page]) -> dict[str, list[Row]]:
    rows = [row for page in pages for row in page.rows.values() if isinstance(row.value, int | float)]
    return {q.name: [row for row in rows if q.metrics.fullmatch(row.metric)] for q in QUANTITIES}


@dataclass(frozen=True)
class Piece:
    """A unit of text that is audited: a paragraph, a table cell or a comment.

    column: the column of the first character, or -1 if the source spells the text differently. label, unit: the name
    and the unit that a key or a table head gives to a bare number. used: whether values in this piece decide something.
    code: whether the piece comes from a program. spelling: of its number in the program.
    """

    text: str
    line: int = 1
    column: int = 0
    label: str = ""
    unit: str | None = None
    used: bool = False
    code: bool = False
    spelling: str = ""

    def place(self, at: int) -> tuple[int, int]:
        """Return the (line, column) of a character of the text."""
        lines = self.text.count("\n", 0, at)
        start = self.text.rfind("\n", 0, at) + 1
        column = -1 if self.column < 0 else at - start + (0 if lines else self.column)
        return self.line + lines, column


# --- written citations ---------------------------------------------------------------------------------------------


def check_citation(match: re.Match, context: Context) -> tuple | None:
    """Return (kind, message[, fix]) if the page, line, metric, value or unit is wrong, and None otherwise."""
    metric, page_name, place = match["metric"], match["page"], match["place"]
    if page_name == CALIBRATION and CALIBRATION not in context.pages:
        return "no page", f"this workspace has no {CALIBRATION}; calibrate_gpu.py writes it"
    roots = ("<workspace>",) if page_name == CALIBRATION else context.roots
    if match["root"].strip("`\"'") not in roots:
        return "malformed", f"'{match['root']}' is not where {page_name} lies; write {roots[0]}/{page_name}"
    if page_name not in context.documents and page_name not in context.pages:
        return "no page", f"{page_name} is not in the wiki"
    page = context.pages.get(page_name)
    if page is None:
        return "no value", f"{page_name} holds no hardware values"
    if context.product and page_name not in context.platform_pages:
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
    if int(place.removeprefix("L")[:9]) != row.line:
        cited = f"{page_name}:{place}"
        return "moved", f"{metric} stands on line {row.line}, not {place}", (cited, f"{page_name}:L{row.line}")
    return None


def check_section(place: str, page_name: str, context: Context) -> tuple | None:
    """Check a citation that names a heading instead of a line. The name is the start of the heading or its link
    anchor."""
    headings = re.findall(r"^#+ (.+)$", context.documents.get(page_name, ""), re.MULTILINE)
    wanted = wiki.normalised(place)
    if any(wiki.normalised(heading).startswith(wanted) for heading in headings):
        return None
    return "no section", f"{page_name} has no section '{place}'; cite the line"


def check_value(match: re.Match, row: Row) -> tuple | None:
    if not row.known:  # UNSUPPORTED may be cited, UNKNOWN may not
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
    if unit is not None and not convertible(rate_of(unit), row.unit):
        return "wrong unit", f"'{unit}' is no unit of {row.metric}; the wiki says: {row.citation}"
    same = given == row.value if unit is None else equal(given, rate_of(unit), row.value, row.unit)
    return None if same else ("wrong value", f"the wiki says: {row.citation}")


def rate_of(unit: str) -> str:
    """Return the canonical unit. A unit of work such as TFLOP is read as a rate, TFLOPS."""
    known_unit = canonical(unit) or unit
    return f"{known_unit}S" if known_unit in WORK else known_unit


def malformed(text: str, context: Context) -> list[tuple[str, str]]:
    """Return the problems of a text that looks like a citation but does not parse. A mention of a page is valid if
    the page exists."""
    mention = MENTION.fullmatch(text)
    if mention is None:
        return [("malformed", "no citation of the form <metric>: <value> <unit> <- <gpu-wiki>/<page>:L<line>")]
    if mention["own"]:
        return []
    page, line = mention["page"], mention["line"]
    if page not in context.documents:
        return [("no page", f"{page} is not in the wiki")]
    if line and int(line[:9]) > len(context.documents[page].splitlines()):
        return [("no page", f"{page} has no line {line}")]
    return []


def hedge_of(text: str, start: int, end: int) -> str | None:
    """Return the hedge next to the text between start and end. No other figure stands between the hedge and the
    text."""
    before = re.split(r"[.;|](?:\s|$)", text[max(0, start - HEDGE_REACH) : start])[-1]
    hedge = HEDGE.search(before)
    if hedge and PART.search(before, hedge.end("hedge")):
        hedge = None  # "about half of it" hedges the half
    hedge = hedge or HEDGE_AFTER.search(text[end : end + HEDGE_REACH])
    return hedge["hedge"] if hedge else None
