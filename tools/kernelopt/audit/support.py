"""What supports a figure: a citation beside it, or a value that a program recorded. Pure."""

import bisect
import re

from .citations import HEDGE_REACH, Context, rate_of
from .figures import Figure
from .stated import SAME, Claim, Reading, matching, rounding
from .units import EXACT, Pattern, converted, convertible, equal, number
from .wording import RIDGE

RECORDED = 0.01  # largest relative difference between a rounded figure and a recorded value
SHARE_OF_CITED = Pattern(r"(\d+(?:\.\d+)?)\s?% of [`'\"(]*$")
WHICH_CLOCK = Pattern(r"(?i)\b(?:(?P<memory>mem(?:ory)?|hbm|dram)|sm|core|graphics|shader)[ _-]clock")


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
