"""Claims: figures in a text that state a hardware value, and the checks of them. All functions are pure.

A wrong citation is always a problem. Where values are used, a figure is also a problem if no citation and no program
gives it for that quantity. Elsewhere, a figure that equals a row of the platform's pages is a hint.
"""

import bisect
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..hardware.wiki import Row
from ..profilers import metrics
from .citations import (
    ARROW,
    CITATION,
    HEDGE_REACH,
    MISSING,
    Context,
    Fix,
    Found,
    Piece,
    Problem,
    check_citation,
    hedge_of,
    malformed,
    rate_of,
)
from .figures import SPOKEN, Figure, figures, key_before, scope_of, sizes_of
from .units import EXACT, SIZES, TABLE_OF, WORK, Pattern, converted, convertible, equal, number
from .wording import (
    BY_NAME,
    BY_TABLE,
    COUNTED,
    DATA_BEFORE,
    HAS,
    LIMITS,
    MEASURABLE,
    ONE_EACH,
    POWER_WORDS,
    QUANTITIES,
    RIDGE,
    WORK_WORDS,
    Quantity,
    blank_names,
    level,
    scope_of_metric,
)

LONG_WORD = Pattern(r"\S{1000,}")  # not a citation; the patterns would take seconds on it
SOMETHING = Pattern(r"[\d<]|UNKNOWN")  # other texts hold only numbers in words, or nothing to check
SAME = 0.001  # largest relative difference between a figure and its row
ROUNDED = 0.05  # the same for a rounded figure whose device the text names
RECORDED = 0.01  # largest relative difference between a rounded figure and a recorded value
SHARE_OF_CITED = Pattern(r"(\d+(?:\.\d+)?)\s?% of [`'\"(]*$")
CAPACITY = Pattern(r"(?i)hbm|gddr|vram|capacity|size|\bGi?B\b|total")
METRIC_NAME = Pattern(
    r"(?i)\b(?:memory bandwidth|memory capacity|l2 capacity|boost clock|tdp|(?:sm|cu) count|(?:warp|wavefront) size)[\s`'\"*]*$"
)
WHICH_CLOCK = Pattern(r"(?i)\b(?:(?P<memory>mem(?:ory)?|hbm|dram)|sm|core|graphics|shader)[ _-]clock")
PEAK_REACH, RUN_REACH, LIMIT_REACH = 45, 30, 45  # characters between such a word and its figure

# The property that a kernel queries instead of a constant (torch's _CudaDeviceProperties).
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


def audit(pieces: Iterable[Piece], context: Context, hints: bool = True) -> Found:
    """Audit every hardware value of the pieces. Without hints, only find what can block a gate."""
    findings = Found()
    for piece in pieces:
        if SOMETHING.search(piece.text) or SPOKEN.search(piece.text):
            audit_piece(piece, context, findings, hints)
    return findings


def audit_piece(piece: Piece, context: Context, findings: Found, hints: bool) -> None:
    text = LONG_WORD.sub(lambda match: " " * len(match[0]), piece.text) if len(piece.text) > 1000 else piece.text
    citations = list(CITATION.finditer(text)) if "<-" in text else []
    missing = list(MISSING.finditer(text)) if "UNKNOWN" in text else []
    for match in citations:
        audit_citation(match, piece, context, findings)
    for match in missing:
        row = context.product.known(match["metric"]) if context.product else None
        if row:
            add(findings, piece, match.start(), "known", f"the wiki holds it: {row.citation}")
    rest = blank(text, [*citations, *missing])
    if "<-" in rest or "<" in rest or "UNKNOWN" in rest:
        for match in ARROW.finditer(rest):
            for kind, message in malformed(match[0], context):
                add(findings, piece, match.start(), kind, message, written=True)
    findings.checked += len(citations) + len(missing)
    if not (piece.used or hints):
        return
    for figure in figures(blank_names(level(rest), context.names), piece.label, piece.unit):
        audit_figure(figure, piece, text, citations, context, findings)


def add(findings: Found, piece: Piece, at: int, kind: str, message: str, written: bool = True, fix=None) -> None:
    """Add a problem or a hint. A written citation is a problem everywhere except in comments. Any other figure is a
    hint unless values are used there."""
    problem = Problem(piece.place(at)[0], kind, message, fix)
    (findings.problems if piece.used or (written and not piece.code) else findings.hints).append(problem)


def blank(text: str, matches: list) -> str:
    """Replace the matches by bars and keep the columns. A bar ends the clause of a figure."""
    for match in matches:
        text = text[: match.start()] + "|".ljust(match.end() - match.start()) + text[match.end() :]
    return text


def audit_citation(match: re.Match, piece: Piece, context: Context, findings: Found) -> None:
    """Check that a citation is right and has no hedge."""
    if problem := check_citation(match, context):
        kind, message, *mended = problem
        fix = Fix(*piece.place(match.start("page")), *mended[0]) if mended else None
        add(findings, piece, match.start("page"), kind, message, fix=fix)
    if hedge := hedge_of(piece.text, match.start(), match.end()):
        message = f"'{hedge}' beside {match['metric']}: a hardware value is exact or UNKNOWN"
        add(findings, piece, match.start(), "hedge", message, written=False)


# --- figures -------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """One interpretation of a figure: a value in a canonical unit, of a quantity."""

    value: float
    unit: str
    quantity: str


@dataclass(frozen=True)
class Claim:
    """The rows that a figure may state. matching: rows of the platform with this value. foreign: rows of other pages, if
    `matching` is empty. derived: rows of which the figure is the share that its clause names. vendors: whether the text
    calls it a peak or the vendor's figure. devices: whether the text speaks of the device, or `vendors` is true."""

    figure: Figure
    readings: list[Reading]
    matching: list[Row]
    foreign: list[Row]
    derived: list[Row]
    vendors: bool
    devices: bool

    @property
    def quantity(self) -> str:
        return self.readings[0].quantity

    @property
    def measurable(self) -> bool:
        return self.quantity in MEASURABLE


def audit_figure(figure: Figure, piece: Piece, text: str, citations: list, context: Context, findings: Found) -> None:
    """Audit a figure outside citations. It is wrong if nothing supports it or if it has a hedge."""
    spelling = piece.spelling or " ".join(text[figure.start : figure.end].split())
    if off := off_ridge(figure, context):
        findings.checked += 1
        add(findings, piece, figure.start, "ridge", f"'{spelling}' {off}", written=False)
        return
    claim = claim_of(figure, piece, context)
    if claim is None or not is_meant(claim, piece):
        return
    findings.checked += 1
    cited = is_held(claim, text, citations, context)
    if not cited:
        kind, message = uncited(spelling, claim, piece, context)
        add(findings, piece, figure.start, kind, message, written=False, fix=citing(claim, text, piece, context))
    hedge = hedge_of(text, figure.start, figure.end)
    if hedge and piece.used and (claim.matching or not cited):
        message = f"'{hedge}' beside {spelling}: a hardware value is exact or UNKNOWN"
        add(findings, piece, figure.start, "hedge", message, written=False)


def claim_of(figure: Figure, piece: Piece, context: Context) -> Claim | None:
    """Return the claim of a figure, or None if the wiki does not know its quantity."""
    readings = readings_of(figure)
    if not readings:
        return None
    quantity = readings[0].quantity
    vendors = figure.says("documented") or (quantity in MEASURABLE and figure.says("peak", PEAK_REACH))
    vendors = vendors or (quantity == "power" and figure.says("most", RUN_REACH))
    devices = vendors or figure.says("device")
    rows = matching(figure, readings, context.rows, ROUNDED if devices else SAME)
    if piece.code and rows and all(map(context.is_common, rows)):
        return None  # a value of all cards of a vendor, such as a warp of 32, names no card
    foreign = [] if rows else matching(figure, readings, context.foreign, SAME)
    derived = shares_of(figure, readings, context) if figure.share and quantity in MEASURABLE and not rows else []
    return Claim(figure, readings, likeliest(rows, figure), foreign, derived, vendors, devices)


def readings_of(figure: Figure) -> list[Reading]:
    """Return the interpretations of a figure. The list is empty if the figure is not a hardware quantity."""
    value = figure.number.value
    if figure.unit is None:
        named = quantities_named(figure.label)
        return [Reading(value, unit, quantity.name) for quantity in named for unit in quantity.units]
    unit = rate_of(figure.unit)
    table = TABLE_OF[unit]
    if table is SIZES:
        return [Reading(value, unit, name) for name in sizes_of(figure)]
    by_unit = BY_TABLE.get(id(table))
    if by_unit == "bandwidth" and BY_NAME["link"].words.search(figure.around):
        return [Reading(value, unit, "link"), Reading(value, unit, "bandwidth")]
    if by_unit:
        return [Reading(value, unit, by_unit)]
    if unit == "bit" and not BY_NAME["bus"].words.search(figure.clause):
        return []
    if unit == "blocks" and ONE_EACH.search(figure.clause):
        return [Reading(value, counted, "multiprocessors") for counted in ("SM", "CU")]
    return [Reading(value, unit, COUNTED[unit])] if unit in COUNTED else []


@functools.lru_cache(4096)
def quantities_named(label: str) -> tuple[Quantity, ...]:
    """Return the quantities that a key can name. The word "memory" alone ("| Memory | … | 16 |") does not name a
    capacity."""
    named = tuple(quantity for quantity in QUANTITIES if quantity.words.search(label))
    return tuple(quantity for quantity in named if quantity.name != "memory" or CAPACITY.search(label))


# --- the rows that a figure equals ---------------------------------------------------------------------------------


def matching(figure: Figure, readings: list[Reading], rows: dict[str, list[Row]], within: float) -> list[Row]:
    """Return the rows of the figure's quantity that hold its value."""
    scope = scope_of(figure)
    matches = [
        row
        for reading in readings
        for row in rows[reading.quantity]
        if scope in (None, scope_of_metric(row.metric) or scope) and holds(row, reading, figure, within)
    ]
    return list(dict.fromkeys(matches))


def holds(row: Row, reading: Reading, figure: Figure, within: float) -> bool:
    """Return whether the row's value equals the figure or rounds to it, with a difference of at most `within`. A
    count is not rounded."""
    if not convertible(reading.unit, row.unit):
        return False
    measurable = reading.quantity in MEASURABLE
    step = rounding(figure) if measurable and figure.unit else 0.0
    for value in converted(row.value, row.unit, reading.unit):
        off = abs(value - reading.value)
        if off <= (SAME if measurable else EXACT) * abs(value) or off <= min(step, within * abs(value)):
            return True
    return False


def rounding(figure: Figure) -> float:
    """Return the largest difference between the figure and a value that rounds to it."""
    return figure.number.step * (1 + SAME)


def shares_of(figure: Figure, readings: list[Reading], context: Context) -> list[Row]:
    """Return the rows of which the figure is the share that its clause names."""
    whole = [reading._replace(value=100 * reading.value / figure.share) for reading in readings]
    return matching(figure, whole, context.rows, SAME)


def likeliest(rows: list[Row], figure: Figure) -> list[Row]:
    """Of rows with the same value, return those whose dtype, sparsity or memory the surrounding words name."""
    words = set(re.findall(r"[a-z]+\d*", f"{figure.label} {figure.around}".lower()))
    if not any(word.startswith("spars") for word in words):
        rows = [row for row in rows if not row.metric.endswith("_sparse")] or rows
    common = set.intersection(*(set(row.metric.split("_")) for row in rows)) if rows else set()
    named = [len((set(row.metric.split("_")) - common) & words) for row in rows]
    return [row for row, count in zip(rows, named, strict=True) if count == max(named)]


# --- is the hardware meant? ----------------------------------------------------------------------------------------


def is_meant(claim: Claim, piece: Piece) -> bool:
    """Return whether a figure describes the hardware, and not only data, work or a run."""
    if claim.figure.unit is None and not claim.matching:
        return piece.used and METRIC_NAME.search(claim.figure.label) is not None
    if claim.measurable:
        return rate_is_meant(claim, piece)
    if claim.quantity in LIMITS:
        return limit_is_meant(claim)
    return size_is_meant(claim, piece)


def rate_is_meant(claim: Claim, piece: Piece) -> bool:
    """Return whether a rate, a clock or a power describes the hardware. Where values are used, any figure with a
    unit does."""
    figure = claim.figure
    if figure.unit is None:  # a key: "peak_bw: 4.8e12"
        return equals_no_chance(claim)
    if claim.quantity == "power" and not (claim.matching or figure.unit == "kW" or POWER_WORDS.search(figure.around)):
        return False  # 62 W is a width
    if figure.unit in WORK and not claim.devices and (not claim.matching or WORK_WORDS.search(figure.after)):
        return False
    if piece.used or claim.derived:
        return True
    if claim.matching:
        return equals_no_chance(claim) and not was_run(claim)
    if claim.foreign:
        return claim.vendors or (figure.says("device") and not was_run(claim))
    return claim.vendors and figure.says("device")


def equals_no_chance(claim: Claim) -> bool:
    """Return whether the match is more than chance. Figures of two digits often equal some row, so the text must
    then name the device or the dtype of the row."""
    few = claim.figure.number.digits <= 2
    return bool(claim.matching) and (
        not few or claim.devices or any(is_named(row, claim.figure) for row in claim.matching)
    )


def is_named(row: Row, figure: Figure) -> bool:
    if row.metric.startswith(("peak_", "measured_")):
        return row.metric.split("_")[1] in figure.around.lower()
    return row.metric in ("memory_bandwidth", "tdp", "boost_clock") or "link" in row.metric


def was_run(claim: Claim) -> bool:
    """Return whether the figure is a result of a past run. The present tense also counts for a quantity that a
    program can measure here."""
    figure = claim.figure
    if claim.vendors or figure.says("modal", RUN_REACH) or figure.says("most", RUN_REACH):
        return False
    could_be_measured = all(row.metric.startswith("measured_") for row in claim.matching)
    return figure.says("ran", RUN_REACH) or (could_be_measured and figure.says("runs", RUN_REACH))


def size_is_meant(claim: Claim, piece: Piece) -> bool:
    """Return whether a figure is the capacity of a memory or the number of multiprocessors."""
    figure = claim.figure
    if claim.matching:
        return True
    if not (piece.used or claim.foreign or claim.quantity == "multiprocessors"):
        return False
    if figure.says("documented"):
        return True
    of_a_run = figure.says("data") or figure.says("ran", RUN_REACH) or figure.says("runs", RUN_REACH)
    return not of_a_run and (figure.says("device") or HAS.search(figure.before) is not None)


def limit_is_meant(claim: Claim) -> bool:
    """Return whether 255 registers, 2048 threads or 48 KB is a limit of the hardware. A kernel has such figures too,
    so the text must name an SM or a limit."""
    figure = claim.figure
    if not (claim.matching or claim.foreign) or is_counter(figure) or DATA_BEFORE.search(figure.before):
        return False
    scope = scope_of(figure)
    limit = figure.says("limit", LIMIT_REACH) or figure.says("documented")
    if figure.says("data") and not limit:
        return False
    if scope is None:
        return bool(claim.matching) and figure.says("most", LIMIT_REACH) and (figure.number.digits > 2 or claim.devices)
    if claim.matching:  # a round number per block may be a launch's own
        return limit or scope != "block" or bool(figure.label) or claim.matching[0].value % 8 != 0
    return limit and scope == "sm"


def is_counter(figure: Figure) -> bool:
    """Return whether the text names the figure as the profiler's report does ("registers_per_thread = 255
    register"). Such a figure belongs to a launch."""
    name = (figure.label or key_before(figure.before)).lower()
    return not figure.says("most", LIMIT_REACH) and any(counter in name for counter in counters())


@functools.cache
def counters() -> frozenset[str]:
    """Return the keys and labels of the profiler's schema, as words."""
    schema = metrics.schema()
    return frozenset(name.lower() for metric in schema for name in (metric.key.replace("_", " "), metric.label))


# --- support of a figure -------------------------------------------------------------------------------------------


def is_held(claim: Claim, text: str, citations: list, context: Context) -> bool:
    """Return whether a citation in the same piece or a recorded value supports the figure."""
    if any(says(cited, text, reading) for cited in citations for reading in claim.readings):
        return True
    if not claim.measurable:
        return False
    exact = claim.quantity in ("bandwidth", "compute") and matching(claim.figure, claim.readings, context.rows, SAME)
    vendors = claim.vendors or bool(exact)
    return any(is_recorded(reading, claim.figure, vendors, context) for reading in claim.readings)


def says(cited: re.Match, text: str, reading: Reading) -> bool:
    """Return whether a citation states the figure, or the figure is a share of it ("90 % of memory_bandwidth: …")."""
    given, unit = number(cited["value"]), rate_of(cited["unit"] or "-")
    if given is None or not convertible(reading.unit, unit):
        return False
    share = SHARE_OF_CITED.search(text, max(0, cited.start() - HEDGE_REACH), cited.start())
    shares = [1.0, float(share[1]) / 100] if share else [1.0]
    return any(equal(reading.value, reading.unit, given * part, unit, SAME) for part in shares)


def is_recorded(reading: Reading, figure: Figure, vendors: bool, context: Context) -> bool:
    """Return whether a program wrote this figure for its quantity, or a value that rounds to it. A Stop Condition
    supports only its own figure. Only a Stop Condition supports a vendor's figure."""
    kinds = ["target"]
    if not vendors:
        kinds += clocks_meant(figure) if reading.quantity == "clock" else [reading.quantity]
    for (of, unit), values in context.recorded.items():
        if of in kinds and convertible(reading.unit, unit):
            value = converted(reading.value, reading.unit, unit)[0]
            step = converted(rounding(figure), reading.unit, unit)[0]
            off = EXACT * value if of == "target" else max(SAME * value, min(step, RECORDED * value))
            at = bisect.bisect_left(values, value - off)
            if at < len(values) and values[at] <= value + off:
                return True
    return False


def clocks_meant(figure: Figure) -> list[str]:
    match = WHICH_CLOCK.search(figure.clause)
    if match is None:
        return ["SM clock", "memory clock"]
    return ["memory clock" if match["memory"] else "SM clock"]


def off_ridge(figure: Figure, context: Context) -> str | None:
    """Return the problem of a ridge point that the tools did not compute, or None."""
    if figure.unit not in (None, "FLOP/byte") or not context.ridges or not RIDGE.search(figure.before):
        return None
    value, step = figure.number.value, rounding(figure)
    if any(abs(value - ridge) <= max(SAME * ridge, min(step, RECORDED * ridge)) for ridge in context.ridges):
        return None
    tools = ", ".join(f"{ridge:.1f}" for ridge in context.ridges)
    return f"is not the ridge point that compute_utilization.py prints for this task: {tools}"


# --- advice --------------------------------------------------------------------------------------------------------


def uncited(spelling: str, claim: Claim, piece: Piece, context: Context) -> tuple[str, str]:
    """Return the (kind, message) of a figure that nothing supports."""
    rows = claim.matching or claim.derived
    platform = context.product.platform if context.product else "this card"
    if piece.code and rows:
        names = " or ".join(row.metric for row in rows)
        return "hard-coded", f"'{spelling}' is {names} of {platform}; {query(rows[0], platform)}"
    return "uncited", f"'{spelling}' {because(claim, platform, context)}"


def because(claim: Claim, platform: str, context: Context) -> str:
    """Return the problem of a figure that nothing supports, and the text to write instead."""
    if claim.matching:
        return (
            f"is no citation and no program recorded it; write: {', or: '.join(row.citation for row in claim.matching)}"
        )
    if claim.derived:
        row = claim.derived[0]
        return f"is a share of {row.metric}; cite that beside it: {row.citation}"
    if claim.foreign:
        row = claim.foreign[0]
        if context.product is None:
            return f"is no citation; if {row.metric} is meant, write: {row.citation}"
        mine = context.product.known(row.metric)
        whose = dict.fromkeys(
            context.pages[other.page].platform for other in claim.foreign if other.metric == row.metric
        )
        theirs = f"is {row.metric} of {' and '.join([*whose][:3])}, the task is for {platform}"
        return f"{theirs}; write: {mine.citation}" if mine else theirs
    if claim.vendors:
        return (
            f"is called a peak or the vendor's, for which no record stands, and no row of {platform} holds it; cite "
            "the wiki"
        )
    return "is no citation and no program recorded it; cite the wiki, or take it from a record"


def query(row: Row, platform: str) -> str:
    """Return the query that a program uses instead of a constant."""
    name = QUERIES.get(row.metric)
    if name:
        return f"ask the device: torch.cuda.get_device_properties(0).{name}"
    return f"pass it in, from: gpu_specs.py lookup '{platform}' {row.metric} ({row.citation})"


def citing(claim: Claim, text: str, piece: Piece, context: Context) -> Fix | None:
    """Return the citation to insert after a hint's figure, if exactly one row matches."""
    figure = claim.figure
    if piece.used or piece.code or piece.column < 0 or len(claim.matching) != 1:
        return None
    row, unit = claim.matching[0], rate_of(figure.unit) if figure.unit else None
    if len(matching(figure, claim.readings, context.rows, SAME)) > 1 and not is_named(row, figure):
        return None
    if unit and not (convertible(unit, row.unit) and equal(figure.number.value, unit, row.value, row.unit)):
        return None
    start = max(figure.start, text.rfind("\n", 0, figure.end) + 1)
    written = text[start : figure.end]
    return Fix(*piece.place(start), written, f"{written} ({row.citation})")
