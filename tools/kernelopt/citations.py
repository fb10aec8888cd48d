"""Hardware values in a text: which are citations that hold, which are none, and what to write instead. Pure.

A hardware value is written `<metric>: <value> <unit> <- <gpu-wiki>/<page>:L<line>`, one of the workspace's own calibration
`<- <workspace>/calibration.md:L<line>`, a missing one `<metric>: UNKNOWN (gpu-wiki not found)`. A citation that does not hold is
a problem wherever it stands. Where values are used, a figure that is neither cited nor recorded by a program is a problem too;
elsewhere one that equals a row of the platform's pages is a hint.
"""

import bisect
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from . import figures, metrics, wiki
from .figures import BY_NAME, BY_TABLE, LIMITS, MEASURABLE, QUANTITIES, Figure
from .units import EXACT, SIZES, TABLE_OF, WORK, canonical, converted, convertible, equal, number
from .wiki import Page, Row

CALIBRATION = "calibration.md"  # the page of the workspace's own card
CITATION = re.compile(
    r"(?P<metric>[A-Za-z_]\w*)\s*:\s*(?P<value>[^\s<]+)(?:[ \t]+(?P<unit>[^\s<]+))?[ \t]*<-[ \t]*"
    r"(?P<root>\S*?)/?(?P<page>docs/[^\s:`\"'()]+?\.md|calibration\.md)(?::(?P<place>L?\d+|[#A-Za-z][\w-]*))?(?=[\s`\"',;.)|]|$)"
)
MISSING = re.compile(r"(?P<metric>[A-Za-z_]\w*): UNKNOWN \(gpu-wiki not found\)")
ARROW = re.compile(
    r"<-[^\n]*?(?:gpu-wiki|docs/\S*\.md|calibration\.md)|UNKNOWN \(gpu-wiki|<(?:gpu-wiki|workspace)>/\S+"
)
MENTION = re.compile(
    r"(?:<gpu-wiki>/(?P<page>docs/[^\s:`\"'()]+\.md|README\.md)|<workspace>/(?P<own>calibration\.md))(?::L?(?P<line>\d+))?[\s`\"',;.)|]*"
)
HEDGE = re.compile(
    r"(?i)(?P<hedge>\b(?:approx(?:imately|\.)?|about|roughly|around|circa|nearly|almost|probably|presumably|likely|maybe|perhaps|"
    r"should be|should have|must be|believed to|similar to|comparable to|same as|typically|usually|i think|i believe|"
    r"estimated|estimate|assum\w+|guess\w*|ballpark|close to|in the order of|on the order of|expected to be|reportedly|"
    r"supposedly|apparently|as far as i know|from memory|iirc|if i recall|like (?:the|an?) [a-z]+\d+)\b|[~≈∼])(?:\b[A-Za-z]\w*|[^\w.;|])*$"
)
HEDGE_AFTER = re.compile(
    r"(?i)^[^.;|\n\d]{0,12}\b(?P<hedge>or so|or thereabouts|more or less|roughly|approximately|probably|i think|ish)\b"
)
HAS = re.compile(r"(?i)\b(?:has|have|offers?|comes? with|counts?|contains?)\s+(?:only |just |exactly )*$")
LONG_WORD = re.compile(r"\S{1000,}")  # no citation, and the patterns would take seconds over it
NOTHING = re.compile(rf"\d|<|{figures.SPELLED}")  # a text in which this is not found holds nothing to check
HEDGE_REACH = 60  # characters before a figure
SAME = 0.001  # how far a figure may be from a row and still be taken for it
ROUNDED = 0.05  # the same, where the text says whose figure it is, and the figure has no more digits
RECORDED = 0.01  # how far a rounded figure may be from what a program recorded

PEAK_REACH, RUN_REACH, LIMIT_REACH, SCOPE_REACH = 45, 30, 45, 40  # characters between such a word and its figure

# What a kernel asks in place of a constant (torch's _CudaDeviceProperties).
QUERIES = {
    "sm_count": "multi_processor_count",
    "cu_count": "multi_processor_count",
    "l2_capacity": "L2_cache_size",
    "memory_capacity": "total_memory",
    "memory_bus_width": "memory_bus_width",
    "warp_size": "warp_size",
    "wavefront_size": "warp_size",
    "shared_memory_per_sm": "shared_memory_per_multiprocessor",
    "shared_memory_per_block": "shared_memory_per_block_optin",
    "shared_memory_per_block_default": "shared_memory_per_block",
    "registers_per_sm": "regs_per_multiprocessor",
    "threads_per_sm": "max_threads_per_multi_processor",
    "threads_per_cu": "max_threads_per_multi_processor",
}


class Fix(NamedTuple):
    """What stands in a line, from that column on, and what belongs there."""

    column: int
    wrong: str
    right: str


@dataclass(frozen=True)
class Problem:
    """One value that is not as it must be, or a hint about one."""

    line: int
    kind: str
    message: str
    fix: Fix | None = None


class Recorded(NamedTuple):
    """What a program wrote. of: bandwidth, compute, SM clock, memory clock, power; or target, a Stop Condition's figure."""

    value: float
    unit: str
    of: str


@dataclass
class Found:
    """What an audit of texts found: how many values it looked at, what holds a gate up, and what does not."""

    checked: int = 0
    problems: list[Problem] = field(default_factory=list)
    hints: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Context:
    """What texts are held against. product: the workspace's platform, None where there is none. measured: what programs wrote
    (records, targets). devices: names that programs wrote. ridges: FLOP/byte, as the tools print it for the task's dtypes."""

    pages: dict[str, Page] = field(
        repr=False
    )  # by path inside the wiki, limits too; the workspace's own by CALIBRATION
    documents: dict[str, str] = field(repr=False)  # text of every page of the wiki, by path
    product: Page | None = None
    measured: frozenset[Recorded] = frozenset()
    roots: tuple[str, ...] = ("<gpu-wiki>", "gpu-wiki", "/tmp/gpu-wiki")
    devices: frozenset[str] = frozenset()
    ridges: tuple[float, ...] = ()

    @functools.cached_property
    def own(self) -> dict[str, Page]:
        """Pages that hold the platform's values."""
        pages = [self.product, self.product.limits, self.pages.get(CALIBRATION)] if self.product else []
        return {page.file: page for page in pages if page}

    @functools.cached_property
    def rows(self) -> dict[str, list[Row]]:
        """The platform's rows that are numbers, by their quantity."""
        return by_quantity(self.own.values())

    @functools.cached_property
    def foreign(self) -> dict[str, list[Row]]:
        """Those of the other pages; without a platform of all pages."""
        return by_quantity(page for name, page in self.pages.items() if name not in self.own)

    @functools.cached_property
    def names(self) -> re.Pattern | None:
        aliases = {alias for page in self.pages.values() if page.limits for alias in (page.platform, *page.aliases)}
        return figures.pattern_of_names(aliases | self.devices)

    @functools.cached_property
    def recorded(self) -> dict[tuple[str, str], list[float]]:
        """What programs recorded, in order, by what it is of and its unit."""
        found: dict[tuple[str, str], list[float]] = {}
        for value, unit, of in self.measured:
            found.setdefault((of, unit), []).append(value)
        return {key: sorted(values) for key, values in found.items()}


def by_quantity(pages: Iterable[Page]) -> dict[str, list[Row]]:
    rows = [row for page in pages for row in page.rows.values() if isinstance(row.value, int | float)]
    return {q.name: [row for row in rows if q.metrics.fullmatch(row.metric)] for q in QUANTITIES}


# --- one piece of text ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A paragraph, a table's cell, a comment: what is read as one.

    column: of its first character; -1 where the text is not written as it is read. label, unit: what a key or a table's head
    says of a bare number in it. used: values here decide something. code: they stand in a program; said: as it has them.
    """

    text: str
    line: int = 1
    column: int = 0
    label: str = ""
    unit: str | None = None
    used: bool = False
    code: bool = False
    said: str = ""

    def place(self, at: int) -> tuple[int, int]:
        """(line, column) of a character of the text."""
        lines = self.text.count("\n", 0, at)
        start = self.text.rfind("\n", 0, at) + 1
        column = -1 if self.column < 0 else at - start + (0 if lines else self.column)
        return self.line + lines, column


def audit(pieces: Iterable[Piece], context: Context) -> Found:
    """Every hardware value of the pieces."""
    found = Found()
    for piece in pieces:
        if NOTHING.search(piece.text):
            audit_piece(piece, context, found)
    return found


def audit_piece(piece: Piece, context: Context, found: Found) -> None:
    text = LONG_WORD.sub(lambda match: " " * len(match[0]), piece.text) if len(piece.text) > 1000 else piece.text
    citations = list(CITATION.finditer(text)) if "<-" in text else []
    missing = list(MISSING.finditer(text)) if "UNKNOWN" in text else []
    for match in citations:
        audit_citation(match, piece, context, found)
    for match in missing:
        row = context.product.known(match["metric"]) if context.product else None
        if row:
            add(found, piece, match.start(), "known", f"the wiki holds it: {row.citation}")
    rest = blank(text, [*citations, *missing])
    if "<-" in rest or "<" in rest or "UNKNOWN" in rest:
        for match in ARROW.finditer(rest):
            for kind, message in malformed(match[0], context):
                add(found, piece, match.start(), kind, message, written=True)
    found.checked += len(citations) + len(missing)
    for figure in figures.figures(figures.blank_names(figures.level(rest), context.names), piece.label, piece.unit):
        audit_figure(figure, piece, text, citations, context, found)


def add(found: Found, piece: Piece, at: int, kind: str, message: str, written: bool = True, fix=None) -> None:
    """A problem of a written citation, which is a claim wherever it stands but for comments; a hint of a figure elsewhere."""
    problem = Problem(piece.place(at)[0], kind, message, fix)
    (found.problems if piece.used or (written and not piece.code) else found.hints).append(problem)


def blank(text: str, matches: list) -> str:
    """The text with the matches replaced by bars, which end what is said of a figure; columns stay."""
    for match in matches:
        text = text[: match.start()] + "|".ljust(match.end() - match.start()) + text[match.end() :]
    return text


# --- written citations ---------------------------------------------------------------------------------------------


def audit_citation(match: re.Match, piece: Piece, context: Context, found: Found) -> None:
    """Does it hold, and does it stand without a hedge?"""
    if problem := check_citation(match, context):
        kind, message, *mended = problem
        column = piece.place(match.start("page"))[1]
        fix = Fix(column, *mended[0]) if mended else None
        add(found, piece, match.start("page"), kind, message, fix=fix)
    if hedge := hedge_of(piece.text, match.start(), match.end()):
        message = f"'{hedge}' beside {match['metric']}: a hardware value is exact or UNKNOWN"
        add(found, piece, match.start(), "hedge", message, written=False)


def check_citation(match: re.Match, context: Context) -> tuple | None:
    """(kind, message[, fix]) when page, line, metric, value or unit do not hold; None when they do."""
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
    if context.product and page_name not in context.own:
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
    """A citation may name a heading of the page in place of the line, as its first word or as a link does."""
    headings = re.findall(r"^#+ (.+)$", context.documents.get(page_name, ""), re.MULTILINE)
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
    if unit is not None and not convertible(rate_of(unit), row.unit):
        return "wrong unit", f"'{unit}' is no unit of {row.metric}; the wiki says: {row.citation}"
    same = given == row.value if unit is None else equal(given, rate_of(unit), row.value, row.unit)
    return None if same else ("wrong value", f"the wiki says: {row.citation}")


def rate_of(unit: str) -> str:
    """The canonical unit; TFLOPS for a TFLOP, which is what a rate is called in haste."""
    found = canonical(unit) or unit
    return f"{found}S" if found in WORK else found


def malformed(text: str, context: Context) -> list[tuple[str, str]]:
    """What looks like a citation and is none; a plain mention of a page needs only the page."""
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
    """The hedge beside what stands there: nothing with a figure is between the two."""
    before = re.split(r"[.;|](?:\s|$)", text[max(0, start - HEDGE_REACH) : start])[-1]
    found = HEDGE.search(before) or HEDGE_AFTER.search(text[end : end + HEDGE_REACH])
    return found["hedge"] if found else None


# --- figures -------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """One way to take a figure: so much, in a canonical unit, of that quantity."""

    value: float
    unit: str
    quantity: str


class Claim(NamedTuple):
    """What a figure says of hardware. own: the platform's rows that hold it; foreign: another page's; cites: it is the
    share of a row (derived)."""

    own: list[Row]
    foreign: list[Row]
    derived: list[Row]
    measurable: bool
    vendors: bool  # it is called a peak, or the vendor's: no record stands for it


def audit_figure(figure: Figure, piece: Piece, text: str, citations: list, context: Context, found: Found) -> None:
    """A figure outside citations: nothing holds it, or it is hedged."""
    said = piece.said or text[figure.start : figure.end].strip()
    if off := off_ridge(figure, context):
        found.checked += 1
        add(found, piece, figure.start, "ridge", f"'{said}' {off}", written=False)
        return
    readings = readings_of(figure)
    claim = claim_of(figure, readings, piece, context)
    if claim is None:
        return
    found.checked += 1
    hedge = hedge_of(text, figure.start, figure.end)
    if not held(figure, readings, claim, text, citations, context):
        kind, message = uncited(said, claim, piece, context)
        add(found, piece, figure.start, kind, message, written=False, fix=citing(figure, text, claim, piece))
    elif not claim.own:
        return
    if hedge and piece.used:
        add(found, piece, figure.start, "hedge", f"'{hedge}' beside {said}: a hardware value is exact or UNKNOWN")


def readings_of(figure: Figure) -> list[Reading]:
    """What a figure may be; nothing when it is of no hardware quantity."""
    value = figure.number.value
    if figure.unit is None:
        named = quantities_named(figure.label)
        return [Reading(value, unit, quantity.name) for quantity in named for unit in quantity.units]
    unit = rate_of(figure.unit)
    table = TABLE_OF[unit]
    if table is SIZES:
        return [Reading(value, unit, name) for name in figures.sizes_of(figure)]
    by_unit = BY_TABLE.get(id(table))
    if by_unit == "bandwidth" and BY_NAME["link"].words.search(figure.around):
        return [Reading(value, unit, "link"), Reading(value, unit, "bandwidth")]
    if by_unit:
        return [Reading(value, unit, by_unit)]
    if unit == "bit" and not BY_NAME["bus"].words.search(figure.clause):
        return []
    if unit == "blocks" and figures.ONE_EACH.search(figure.clause):
        return [Reading(value, "SM", "multiprocessors")]
    return [Reading(value, unit, figures.COUNTED[unit])] if unit in figures.COUNTED else []


@functools.lru_cache(4096)
def quantities_named(label: str) -> tuple[figures.Quantity, ...]:
    return tuple(quantity for quantity in QUANTITIES if quantity.words.search(label))


def claim_of(figure: Figure, readings: list[Reading], piece: Piece, context: Context) -> Claim | None:
    """What a figure says of hardware; None where it speaks of data, work or a run alone, or of nothing that the wiki knows."""
    if not readings:
        return None
    measurable = readings[0].quantity in MEASURABLE
    vendors = figure.says("documented") or (measurable and figure.says("peak", PEAK_REACH))
    devices = vendors or figure.says("device")
    within = ROUNDED if devices else SAME
    own = matching(figure, readings, context.rows, within)
    foreign = [] if own else matching(figure, readings, context.foreign, SAME)
    derived = shares_of(figure, readings, context) if measurable and figure.share and not own else []
    claim = Claim(likeliest(own, figure), foreign, derived, measurable, vendors)
    judge = measured_claim if measurable else fixed_claim
    return claim if judge(figure, readings, claim, devices, piece) else None


def measured_claim(figure: Figure, readings: list[Reading], claim: Claim, devices: bool, piece: Piece) -> bool:
    """Does a rate, a clock or a power speak of the hardware? Where values are used any does."""
    quantity = readings[0].quantity
    if quantity == "power" and figure.unit and not power_is_meant(figure, claim):
        return False
    if figure.unit in WORK and not (devices or (claim.own and not figures.WORK.search(figure.after))):
        return False
    if (
        figure.unit is None
    ):  # "peak_bw: 4.8e12"; a key of a run (bandwidth_gbps) is a hardware value only where it says so
        return bool(claim.own) or (claim.vendors and piece.used)
    if piece.used or claim.derived:
        return True
    ran = has_run(figure, claim)
    if claim.own:
        return not ran and (figure.number.digits > 2 or devices or default_row(claim.own, figure))
    if claim.foreign:
        return claim.vendors or (figure.says("device") and not ran)
    return claim.vendors and figure.says("device")


def has_run(figure: Figure, claim: Claim) -> bool:
    """Is it a figure of a run that was? The present tense is one of what a program could measure here, too."""
    if claim.vendors or figure.says("modal", RUN_REACH) or figure.says("most", RUN_REACH):
        return False
    own_measured = all(row.metric.startswith("measured_") for row in claim.own)
    return figure.says("ran", RUN_REACH) or (own_measured and figure.says("runs", RUN_REACH))


def power_is_meant(figure: Figure, claim: Claim) -> bool:
    """62 W may be a width."""
    return figure.unit == "kW" or bool(figures.POWER_WORDS.search(figure.around)) or bool(claim.own)


def default_row(rows: list[Row], figure: Figure) -> bool:
    """Is a row meant by a figure of few digits, with no word of whose it is? A peak only where its dtype is named."""
    return any(
        row.metric in ("memory_bandwidth", "tdp", "boost_clock")
        or (
            row.metric.startswith(("peak_", "measured_"))
            and any(word in figure.around.lower() for word in row.metric.split("_")[1:2])
        )
        or "link" in row.metric
        for row in rows
    )


def fixed_claim(figure: Figure, readings: list[Reading], claim: Claim, devices: bool, piece: Piece) -> bool:
    """Does a count or a size speak of the hardware, and not of a launch?"""
    quantity = readings[0].quantity
    if quantity in LIMITS or quantity in ("shared memory", "LDS", "L1", "register file"):
        return limit_is_meant(figure, quantity, claim, devices)
    if claim.own:
        return True
    data = figure.says("data") or figure.says("ran", RUN_REACH) or figure.says("runs", RUN_REACH)
    said = (
        figure.says("documented")
        or (figure.says("device") and not data)
        or (bool(HAS.search(figure.before)) and not data)
    )
    return said if piece.used or claim.foreign or quantity == "multiprocessors" else False


def limit_is_meant(figure: Figure, quantity: str, claim: Claim, devices: bool) -> bool:
    """255 registers, 2048 threads, 48 KB: a kernel has them too. A limit is of an SM, or is called one."""
    if not (claim.own or claim.foreign):
        return False
    if figure.label and "_".join(figure.label.split()).endswith(profiler_keys()):
        return False  # a counter of that name
    if figures.DATA_BEFORE.search(figure.before):
        return False
    scope = figures.scope_of(figure)
    limit = figure.says("limit", LIMIT_REACH) or figure.says("documented")
    if figure.says("data") and not limit:
        return False
    if scope is None:
        return bool(claim.own) and figure.says("most", LIMIT_REACH) and (figure.number.digits > 2 or devices)
    if claim.own:  # a round number per block may be a launch's own
        return limit or scope != "block" or figure.label is not None or claim.own[0].value % 8 != 0
    return limit and scope == "sm"


def likeliest(rows: list[Row], figure: Figure) -> list[Row]:
    """Of rows that hold the same figure those whose dtype, sparsity or memory the words beside it name."""
    words = set(re.findall(r"[a-z]+\d*", f"{figure.label or ''} {figure.around}".lower()))
    words |= {"sparse"} if any(word.startswith("spars") for word in words) else set()
    if "sparse" not in words:
        rows = [row for row in rows if not row.metric.endswith("_sparse")] or rows
    common = set.intersection(*(set(row.metric.split("_")) for row in rows)) if rows else set()
    named = [len((set(row.metric.split("_")) - common) & words) for row in rows]
    return [row for row, count in zip(rows, named, strict=True) if count == max(named)]


@functools.cache
def profiler_keys() -> tuple[str, ...]:
    return tuple(metric.key for metric in metrics.schema())


def matching(figure: Figure, readings: list[Reading], rows: dict[str, list[Row]], within: float) -> list[Row]:
    """The rows of the figure's quantity that hold it."""
    scope = figures.scope_of(figure)
    found = [
        row
        for reading in readings
        for row in rows[reading.quantity]
        if scope in (None, figures.scope_of_metric(row.metric) or scope) and holds(row, reading, figure, within)
    ]
    return list(dict.fromkeys(found))


def holds(row: Row, reading: Reading, figure: Figure, within: float) -> bool:
    if not convertible(reading.unit, row.unit):
        return False
    counted = reading.quantity not in MEASURABLE
    step = figure.number.step * 1.001 if figure.unit and not counted else 0.0
    for value in converted(row.value, row.unit, reading.unit):
        off = abs(value - reading.value)
        if off <= (EXACT if counted else SAME) * abs(value) or off <= min(step, within * abs(value)):
            return True
    return False


def shares_of(figure: Figure, readings: list[Reading], context: Context) -> list[Row]:
    """The rows of which it is the share that its clause speaks of."""
    whole = [reading._replace(value=100 * reading.value / figure.share) for reading in readings]
    return matching(figure, whole, context.rows, SAME)


def held(figure: Figure, readings: list[Reading], claim: Claim, text: str, citations: list, context: Context) -> bool:
    """Does a citation of the same piece say it, or a share of one, or did a program record it, for that quantity?"""
    values = [reading for reading in readings if figure.unit] or readings
    for cited in citations:
        given, unit = number(cited["value"]), rate_of(cited["unit"] or "-")
        share = re.search(r"(\d+(?:\.\d+)?)\s?% of [`'\"(]*$", text[max(0, cited.start() - 20) : cited.start()])
        for whole in (given, given * float(share[1]) / 100 if given is not None and share else None):
            if whole is not None and any(
                convertible(reading.unit, unit) and equal(reading.value, reading.unit, whole, unit, SAME)
                for reading in values
            ):
                return True
    if not claim.measurable:
        return False
    return any(is_recorded(reading, figure, claim.vendors, context) for reading in values)


def is_recorded(reading: Reading, figure: Figure, vendors: bool, context: Context) -> bool:
    """Did a program write this figure, of its quantity, or one that rounds to it? A Stop Condition's stands for itself
    alone, and nothing for a figure that is called the vendor's."""
    kinds = ["target"]
    if not vendors:
        memory = "memory" in figure.around.lower()
        clocks = ["memory clock"] if memory else ["SM clock", "memory clock"]
        kinds += clocks if reading.quantity == "clock" else [reading.quantity]
    for (of, unit), values in context.recorded.items():
        if of in kinds and convertible(reading.unit, unit):
            value = converted(reading.value, reading.unit, unit)[0]
            step = converted(figure.number.step, reading.unit, unit)[0]
            off = EXACT * value if of == "target" else max(SAME * value, min(step * 1.001, RECORDED * value))
            at = bisect.bisect_left(values, value - off)
            if at < len(values) and values[at] <= value + off:
                return True
    return False


def off_ridge(figure: Figure, context: Context) -> str | None:
    """What is wrong with a ridge point: the tools compute it, nobody else."""
    if figure.unit not in (None, "FLOP/byte") or not context.ridges or not figures.RIDGE.search(figure.before):
        return None
    value, step = figure.number.value, figure.number.step
    if any(abs(value - ridge) <= max(SAME * ridge, min(step * 1.001, RECORDED * ridge)) for ridge in context.ridges):
        return None
    tools = ", ".join(f"{ridge:.1f}" for ridge in context.ridges)
    return f"is not the ridge point that compute_utilization.py prints for this task: {tools}"


# --- what to write -------------------------------------------------------------------------------------------------


def uncited(said: str, claim: Claim, piece: Piece, context: Context) -> tuple[str, str]:
    """(kind, message) for a figure that nothing holds."""
    rows = claim.own or claim.derived
    if piece.code and rows:
        names = " or ".join(row.metric for row in rows)
        return "hard-coded", f"'{said}' is {names} of {platform_of(context)}; {query(rows[0], context)}"
    if claim.own:
        citations = ", or: ".join(row.citation for row in claim.own)
        return "uncited", f"'{said}' is no citation and no program recorded it; write: {citations}"
    if claim.derived:
        return "uncited", f"'{said}' is a share of {rows[0].metric}; cite that beside it: {rows[0].citation}"
    if claim.foreign:
        row = claim.foreign[0]
        mine = context.product.known(row.metric) if context.product else None
        instead = f"; write: {mine.citation}" if mine else ""
        theirs = context.pages[row.page].platform
        return "uncited", f"'{said}' is {row.metric} of {theirs}, the task is for {platform_of(context)}{instead}"
    if claim.vendors:
        return (
            "uncited",
            f"'{said}' is called a peak or the vendor's, for which no record stands, and no row of {platform_of(context)} holds it; "
            "cite the wiki",
        )
    return "uncited", f"'{said}' is no citation and no program recorded it; cite the wiki, or take it from a record"


def platform_of(context: Context) -> str:
    return context.product.platform if context.product else "no platform"


def query(row: Row, context: Context) -> str:
    """What a program does in place of holding the value."""
    name = QUERIES.get(row.metric)
    if name:
        return f"ask the device: torch.cuda.get_device_properties(0).{name}"
    return f"pass it in, from: gpu_specs.py lookup '{platform_of(context)}' {row.metric} ({row.citation})"


def citing(figure: Figure, text: str, claim: Claim, piece: Piece) -> Fix | None:
    """The citation behind the figure, where one row alone can be meant and is what the figure says."""
    if piece.used or piece.code or piece.column < 0 or len(claim.own) != 1:
        return None
    row, unit = claim.own[0], rate_of(figure.unit) if figure.unit else None
    if unit and not (convertible(unit, row.unit) and equal(figure.number.value, unit, row.value, row.unit)):
        return None
    start = max(figure.start, text.rfind("\n", 0, figure.end) + 1)
    _, column = piece.place(start)
    said = text[start : figure.end]
    return Fix(column, said, f"{said} ({row.citation})")
