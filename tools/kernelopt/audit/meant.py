"""Does a figure describe the hardware, and not only data, work or a run? Pure."""

import functools

from ..hardware import roofline
from ..profilers import metrics
from .citations import Piece
from .figures import Figure, key_before, scope_of
from .stated import RUN_REACH, Claim, is_named
from .units import WORK, Pattern
from .wording import DATA_BEFORE, HAS, LIMITS, LISTED, POWER_WORDS, SM_HAS, WORK_WORDS

METRIC_NAME = Pattern(
    r"(?i)\b(?:memory bandwidth|memory capacity|l2 capacity|boost clock|tdp|(?:sm|cu) count|(?:warp|wavefront) size)[\s`'\"*]*$"
)
LIMIT_REACH = 45  # characters between such a word and its figure


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


def was_run(claim: Claim) -> bool:
    """Return whether the figure is a result of a past run. The present tense also counts for a quantity that a
    program can measure here."""
    figure = claim.figure
    if claim.vendors or figure.says("modal", RUN_REACH) or figure.says("most", RUN_REACH):
        return False
    could_be_measured = all(roofline.is_measured(row.metric) for row in claim.matching)
    return figure.says("ran", RUN_REACH) or (could_be_measured and figure.says("runs", RUN_REACH))


def size_is_meant(claim: Claim, piece: Piece) -> bool:
    """Return whether a figure is the capacity of a memory or the number of multiprocessors."""
    figure = claim.figure
    if claim.matching or (piece.used and is_listed(claim)):
        return True
    if not (piece.used or claim.foreign or claim.quantity == "multiprocessors"):
        return False
    if figure.says("documented"):
        return True
    of_a_run = figure.says("data") or figure.says("ran", RUN_REACH) or figure.says("runs", RUN_REACH)
    return not of_a_run and (figure.says("device") or HAS.search(figure.before) is not None)


def is_listed(claim: Claim) -> bool:
    """Return whether a number of multiprocessors follows other values of a named device: "L40S: 1 GB/s, 2 SMs"."""
    return claim.quantity == "multiprocessors" and LISTED.search(claim.figure.clause) is not None


def limit_is_meant(claim: Claim) -> bool:
    """Return whether 255 registers, 2048 threads or 48 KB is a limit of the hardware. A kernel has such figures too,
    so the text must name an SM or a limit."""
    figure = claim.figure
    if not (claim.matching or claim.foreign) or is_counter(figure) or DATA_BEFORE.search(figure.before):
        return False
    scope = scope_of(figure)
    limit = figure.says("limit", LIMIT_REACH) or figure.says("documented") or SM_HAS.search(figure.clause)
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
