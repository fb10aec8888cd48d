"""Figures of hardware in a text: which are claims, what holds them, and what to write instead. Pure.

A citation that does not hold is a problem wherever it stands. Where values are used, a figure that is neither cited nor
recorded by a program, of that quantity, is a problem too; elsewhere one that equals a row of the platform's pages is a
hint.
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

LONG_WORD = Pattern(r"\S{1000,}")  # no citation, and the patterns would take seconds over it
SOMETHING = Pattern(r"[\d<]|UNKNOWN")  # a text without holds nothing to check, or a number in words
SAME = 0.001  # how far a figure may be from a row and still be taken for it
ROUNDED = 0.05  # the same, where the text says whose figure it is, and the figure has no more digits
RECORDED = 0.01  # how far a rounded figure may be from what a program recorded
SHARE_OF_CITED = Pattern(r"(\d+(?:\.\d+)?)\s?% of [`'\"(]*$")
CAPACITY = Pattern(r"(?i)hbm|gddr|vram|capacity|size|\bGi?B\b|total")
METRIC_NAME = Pattern(
    r"(?i)\b(?:memory bandwidth|memory capacity|l2 capacity|boost clock|tdp|(?:sm|cu) count|(?:warp|wavefront) size)[\s`'\"*]*$"
)
WHICH_CLOCK = Pattern(r"(?i)\b(?:(?P<memory>mem(?:ory)?|hbm|dram)|sm|core|graphics|shader)[ _-]clock")
PEAK_REACH, RUN_REACH, LIMIT_REACH = 45, 30, 45  # characters between such a word and its figure

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


def audit(pieces: Iterable[Piece], context: Context, hints: bool = True) -> Found:
    """Every hardware value of the pieces; without hints only what may hold a gate up."""
    found = Found()
    for piece in pieces:
        if SOMETHING.search(piece.text) or SPOKEN.search(piece.text):
            audit_piece(piece, context, found, hints)
    return found


def audit_piece(piece: Piece, context: Context, found: Found, hints: bool) -> None:
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
    if not (piece.used or hints):
        return
    for figure in figures(blank_names(level(rest), context.names), piece.label, piece.unit):
        audit_figure(figure, piece, text, citations, context, found)


def add(found: Found, piece: Piece, at: int, kind: str, message: str, written: bool = True, fix=None) -> None:
    """A problem of a written citation, which is a claim wherever it stands but for comments; a hint of a figure
    elsewhere."""
    problem = Problem(piece.place(at)[0], kind, message, fix)
    (found.problems if piece.used or (written and not piece.code) else found.hints).append(problem)


def blank(text: str, matches: list) -> str:
    """The text with the matches replaced by bars, which end what is said of a figure; columns stay."""
    for match in matches:
        text = text[: match.start()] + "|".ljust(match.end() - match.start()) + text[match.end() :]
    return text


def audit_citation(match: re.Match, piece: Piece, context: Context, found: Found) -> None:
    """Does it hold, and does it stand without a hedge?"""
    if problem := check_citation(match, context):
        kind, message, *mended = problem
        fix = Fix(*piece.place(match.start("page")), *mended[0]) if mended else None
        add(found, piece, match.start("page"), kind, message, fix=fix)
    if hedge := hedge_of(piece.text, match.start(), match.end()):
        message = f"'{hedge}' beside {match['metric']}: a hardware value is exact or UNKNOWN"
        add(found, piece, match.start(), "hedge", message, written=False)


# --- figures -------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """One way to take a figure: so much, in a canonical unit, of that quantity."""

    value: float
    unit: str
    quantity: str


@dataclass(frozen=True)
class Claim:
    """What a figure may say of hardware. own: the platform's rows that hold it; foreign: those of other pages, where
    there are none; derived: those of which it is the share that its clause names. vendors: it is called a peak or
    the vendor's; devices: somebody speaks of the device, or that."""

    figure: Figure
    readings: list[Reading]
    own: list[Row]
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


def audit_figure(figure: Figure, piece: Piece, text: str, citations: list, context: Context, found: Found) -> None:
    """A figure outside citations: nothing holds it, or it is hedged."""
    said = piece.said or " ".join(text[figure.start : figure.end].split())
    if off := off_ridge(figure, context):
        found.checked += 1
        add(found, piece, figure.start, "ridge", f"'{said}' {off}", written=False)
        return
    claim = claim_of(figure, piece, context)
    if claim is None or not is_meant(claim, piece):
        return
    found.checked += 1
    cited = is_held(claim, text, citations, context)
    if not cited:
        kind, message = uncited(said, claim, piece, context)
        add(found, piece, figure.start, kind, message, written=False, fix=citing(claim, text, piece, context))
    hedge = hedge_of(text, figure.start, figure.end)
    if hedge and piece.used and (claim.own or not cited):
        message = f"'{hedge}' beside {said}: a hardware value is exact or UNKNOWN"
        add(found, piece, figure.start, "hedge", message, written=False)


def claim_of(figure: Figure, piece: Piece, context: Context) -> Claim | None:
    """What a figure may say of hardware; None when it is of no quantity that the wiki knows."""
    readings = readings_of(figure)
    if not readings:
        return None
    quantity = readings[0].quantity
    vendors = figure.says("documented") or (quantity in MEASURABLE and figure.says("peak", PEAK_REACH))
    vendors = vendors or (quantity == "power" and figure.says("most", RUN_REACH))
    devices = vendors or figure.says("device")
    own = matching(figure, readings, context.rows, ROUNDED if devices else SAME)
    if piece.code and own and all(map(context.is_common, own)):
        return None  # what all cards of a vendor have (a warp of 32) is no card's
    foreign = [] if own else matching(figure, readings, context.foreign, SAME)
    derived = shares_of(figure, readings, context) if figure.share and quantity in MEASURABLE and not own else []
    return Claim(figure, readings, likeliest(own, figure), foreign, derived, vendors, devices)


def readings_of(figure: Figure) -> list[Reading]:
    """What a figure may be; nothing when it is of no hardware quantity."""
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
    """What a key can be of. Memory alone ("| Memory | … | 16 |") is too little to be a capacity."""
    named = tuple(quantity for quantity in QUANTITIES if quantity.words.search(label))
    return tuple(quantity for quantity in named if quantity.name != "memory" or CAPACITY.search(label))


# --- the rows that a figure equals ---------------------------------------------------------------------------------


def matching(figure: Figure, readings: list[Reading], rows: dict[str, list[Row]], within: float) -> list[Row]:
    """The rows of the figure's quantity that hold it."""
    scope = scope_of(figure)
    found = [
        row
        for reading in readings
        for row in rows[reading.quantity]
        if scope in (None, scope_of_metric(row.metric) or scope) and holds(row, reading, figure, within)
    ]
    return list(dict.fromkeys(found))


def holds(row: Row, reading: Reading, figure: Figure, within: float) -> bool:
    """Is the row's value the figure's, or one that the figure rounds, by `within` at most? A count is not rounded."""
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
    """By how much a value may differ that is written as this figure."""
    return figure.number.step * (1 + SAME)


def shares_of(figure: Figure, readings: list[Reading], context: Context) -> list[Row]:
    """The rows of which it is the share that its clause speaks of."""
    whole = [reading._replace(value=100 * reading.value / figure.share) for reading in readings]
    return matching(figure, whole, context.rows, SAME)


def likeliest(rows: list[Row], figure: Figure) -> list[Row]:
    """Of rows that hold the same figure those whose dtype, sparsity or memory the words beside it name."""
    words = set(re.findall(r"[a-z]+\d*", f"{figure.label} {figure.around}".lower()))
    if not any(word.startswith("spars") for word in words):
        rows = [row for row in rows if not row.metric.endswith("_sparse")] or rows
    common = set.intersection(*(set(row.metric.split("_")) for row in rows)) if rows else set()
    named = [len((set(row.metric.split("_")) - common) & words) for row in rows]
    return [row for row, count in zip(rows, named, strict=True) if count == max(named)]


# --- is the hardware meant? ----------------------------------------------------------------------------------------


def is_meant(claim: Claim, piece: Piece) -> bool:
    """Does a figure speak of the hardware, and not of data, work or a run alone?"""
    if claim.figure.unit is None and not claim.own:
        return piece.used and METRIC_NAME.search(claim.figure.label) is not None
    if claim.measurable:
        return rate_is_meant(claim, piece)
    if claim.quantity in LIMITS:
        return limit_is_meant(claim)
    return size_is_meant(claim, piece)


def rate_is_meant(claim: Claim, piece: Piece) -> bool:
    """A rate, a clock or a power. Where values are used any that is written with its unit is meant."""
    figure = claim.figure
    if figure.unit is None:  # a key: "peak_bw: 4.8e12"
        return equals_no_chance(claim)
    if claim.quantity == "power" and not (claim.own or figure.unit == "kW" or POWER_WORDS.search(figure.around)):
        return False  # 62 W is a width
    if figure.unit in WORK and not claim.devices and (not claim.own or WORK_WORDS.search(figure.after)):
        return False
    if piece.used or claim.derived:
        return True
    if claim.own:
        return equals_no_chance(claim) and not was_run(claim)
    if claim.foreign:
        return claim.vendors or (figure.says("device") and not was_run(claim))
    return claim.vendors and figure.says("device")


def equals_no_chance(claim: Claim) -> bool:
    """Two digits equal some row by chance: then the text must name the device or the row's own dtype."""
    few = claim.figure.number.digits <= 2
    return bool(claim.own) and (not few or claim.devices or any(is_named(row, claim.figure) for row in claim.own))


def is_named(row: Row, figure: Figure) -> bool:
    if row.metric.startswith(("peak_", "measured_")):
        return row.metric.split("_")[1] in figure.around.lower()
    return row.metric in ("memory_bandwidth", "tdp", "boost_clock") or "link" in row.metric


def was_run(claim: Claim) -> bool:
    """Is it a figure of a run that was? The present tense is so of what a program could measure here, too."""
    figure = claim.figure
    if claim.vendors or figure.says("modal", RUN_REACH) or figure.says("most", RUN_REACH):
        return False
    could_be_measured = all(row.metric.startswith("measured_") for row in claim.own)
    return figure.says("ran", RUN_REACH) or (could_be_measured and figure.says("runs", RUN_REACH))


def size_is_meant(claim: Claim, piece: Piece) -> bool:
    """The capacity of a memory, or the number of multiprocessors."""
    figure = claim.figure
    if claim.own:
        return True
    if not (piece.used or claim.foreign or claim.quantity == "multiprocessors"):
        return False
    if figure.says("documented"):
        return True
    of_a_run = figure.says("data") or figure.says("ran", RUN_REACH) or figure.says("runs", RUN_REACH)
    return not of_a_run and (figure.says("device") or HAS.search(figure.before) is not None)


def limit_is_meant(claim: Claim) -> bool:
    """255 registers, 2048 threads, 48 KB: a kernel has them too. A limit is of an SM, or is called one."""
    figure = claim.figure
    if not (claim.own or claim.foreign) or is_counter(figure) or DATA_BEFORE.search(figure.before):
        return False
    scope = scope_of(figure)
    limit = figure.says("limit", LIMIT_REACH) or figure.says("documented")
    if figure.says("data") and not limit:
        return False
    if scope is None:
        return bool(claim.own) and figure.says("most", LIMIT_REACH) and (figure.number.digits > 2 or claim.devices)
    if claim.own:  # a round number per block may be a launch's own
        return limit or scope != "block" or bool(figure.label) or claim.own[0].value % 8 != 0
    return limit and scope == "sm"


def is_counter(figure: Figure) -> bool:
    """Is it named as the profiler's report names it ("registers_per_thread = 255 register"), which is of a launch?"""
    name = (figure.label or key_before(figure.before)).lower()
    return not figure.says("most", LIMIT_REACH) and any(counter in name for counter in counters())


@functools.cache
def counters() -> frozenset[str]:
    """Keys and labels of the profiler's schema, in words."""
    schema = metrics.schema()
    return frozenset(name.lower() for metric in schema for name in (metric.key.replace("_", " "), metric.label))


# --- what holds a figure -------------------------------------------------------------------------------------------


def is_held(claim: Claim, text: str, citations: list, context: Context) -> bool:
    """Does a citation of the same piece say it, or did a program record it, of that quantity?"""
    if any(says(cited, text, reading) for cited in citations for reading in claim.readings):
        return True
    if not claim.measurable:
        return False
    exact = claim.quantity in ("bandwidth", "compute") and matching(claim.figure, claim.readings, context.rows, SAME)
    vendors = claim.vendors or bool(exact)
    return any(is_recorded(reading, claim.figure, vendors, context) for reading in claim.readings)


def says(cited: re.Match, text: str, reading: Reading) -> bool:
    """Does a citation say the figure, or is it the share of it ("90 % of memory_bandwidth: …")?"""
    given, unit = number(cited["value"]), rate_of(cited["unit"] or "-")
    if given is None or not convertible(reading.unit, unit):
        return False
    share = SHARE_OF_CITED.search(text, max(0, cited.start() - HEDGE_REACH), cited.start())
    shares = [1.0, float(share[1]) / 100] if share else [1.0]
    return any(equal(reading.value, reading.unit, given * part, unit, SAME) for part in shares)


def is_recorded(reading: Reading, figure: Figure, vendors: bool, context: Context) -> bool:
    """Did a program write this figure, of its quantity, or one that rounds to it? A Stop Condition's stands for itself
    alone, and nothing else for the vendor's figure."""
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
    said = WHICH_CLOCK.search(figure.clause)
    if said is None:
        return ["SM clock", "memory clock"]
    return ["memory clock" if said["memory"] else "SM clock"]


def off_ridge(figure: Figure, context: Context) -> str | None:
    """What is wrong with a ridge point: the tools compute it, nobody else."""
    if figure.unit not in (None, "FLOP/byte") or not context.ridges or not RIDGE.search(figure.before):
        return None
    value, step = figure.number.value, rounding(figure)
    if any(abs(value - ridge) <= max(SAME * ridge, min(step, RECORDED * ridge)) for ridge in context.ridges):
        return None
    tools = ", ".join(f"{ridge:.1f}" for ridge in context.ridges)
    return f"is not the ridge point that compute_utilization.py prints for this task: {tools}"


# --- what to write -------------------------------------------------------------------------------------------------


def uncited(said: str, claim: Claim, piece: Piece, context: Context) -> tuple[str, str]:
    """(kind, message) for a figure that nothing holds."""
    rows = claim.own or claim.derived
    platform = context.product.platform if context.product else "this card"
    if piece.code and rows:
        names = " or ".join(row.metric for row in rows)
        return "hard-coded", f"'{said}' is {names} of {platform}; {query(rows[0], platform)}"
    return "uncited", f"'{said}' {because(claim, platform, context)}"


def because(claim: Claim, platform: str, context: Context) -> str:
    """What is wrong with a figure that nothing holds, and what to write."""
    if claim.own:
        return f"is no citation and no program recorded it; write: {', or: '.join(row.citation for row in claim.own)}"
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
    """What a program does in place of holding the value."""
    name = QUERIES.get(row.metric)
    if name:
        return f"ask the device: torch.cuda.get_device_properties(0).{name}"
    return f"pass it in, from: gpu_specs.py lookup '{platform}' {row.metric} ({row.citation})"


def citing(claim: Claim, text: str, piece: Piece, context: Context) -> Fix | None:
    """The citation behind a hint's figure, where one row alone can be meant and is what the figure says."""
    figure = claim.figure
    if piece.used or piece.code or piece.column < 0 or len(claim.own) != 1:
        return None
    row, unit = claim.own[0], rate_of(figure.unit) if figure.unit else None
    if len(matching(figure, claim.readings, context.rows, SAME)) > 1 and not is_named(row, figure):
        return None
    if unit and not (convertible(unit, row.unit) and equal(figure.number.value, unit, row.value, row.unit)):
        return None
    start = max(figure.start, text.rfind("\n", 0, figure.end) + 1)
    said = text[start : figure.end]
    return Fix(*piece.place(start), said, f"{said} ({row.citation})")
