"""Which rows of the wiki a figure in a text may state: its readings, and the rows that they equal. Pure."""

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

from ..hardware.wiki import Row
from .citations import Context, Piece, rate_of
from .figures import Figure, scope_of, sizes_of
from .units import EXACT, SIZES, TABLE_OF, Pattern, converted, convertible
from .wording import BY_NAME, BY_TABLE, COUNTED, MEASURABLE, ONE_EACH, QUANTITIES, Quantity, scope_of_metric

SAME = 0.001  # largest relative difference between a figure and its row
ROUNDED = 0.05  # the same for a rounded figure whose device the text names
CAPACITY = Pattern(r"(?i)hbm|gddr|vram|capacity|size|\bGi?B\b|total")
PEAK_REACH, RUN_REACH = 45, 30  # characters between such a word and its figure


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


def is_named(row: Row, figure: Figure) -> bool:
    if row.metric.startswith(("peak_", "measured_")):
        return row.metric.split("_")[1] in figure.around.lower()
    return row.metric in ("memory_bandwidth", "tdp", "boost_clock") or "link" in row.metric
