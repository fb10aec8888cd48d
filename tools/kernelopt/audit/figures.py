"""Figures in a text: numbers with their units and the words around them. All functions are pure; `wording` defines the
meaning of the words.

A text is one piece: a paragraph, a table cell or a comment. It is levelled, and device names are marked in it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .units import DIGITS, SPELLED, Number, Pattern, read_number, unit_at
from .wording import (
    BY_NAME,
    CAMEL,
    COUNTED,
    CUE,
    DATA_AFTER,
    DATA_BEFORE,
    DATA_NOUN,
    DEVICE_HAS,
    LINK,
    OF,
    RIDGE,
    SCOPES,
    SHARE,
    SIZES_OF,
    SM_HAS,
    level,
)

REACH = 70  # characters on each side of a figure that can describe it
LEAST_SPELLED = 20  # least number in words without a unit; smaller ones are common words
SCOPE_REACH = 40  # the same, for the words SM, block and thread
CLAUSE = Pattern(r"(?<!\bi\.e)(?<!\be\.g)(?<!\bvs)(?<!\bapprox)[.;!?|](?=\s|$)|\n\s*\n")
SEPARATOR = Pattern(r"[,:()]|\b(?:and|but|while|where|against|of)\b")

_start = r"(?<![\w.#^@/\\])(?<![\w.]-)"
_range = r"\s*(?:-|/|…|\.{2,3}|\bto\b|\band\b|\bor\b|\bthrough\b)\s*"
NUMBERS = Pattern(rf"{_start}(?:{DIGITS})(?:{_range}(?:{DIGITS}))*|{SPELLED}")
NUMBER = Pattern(rf"(?:{DIGITS})|{SPELLED}")
SPOKEN = Pattern(SPELLED)
VERSIONED = Pattern(r"[A-Z]\w*\s$")  # "NVLink 4 900 GB/s" does not contain 4900
BEFORE_UNIT = Pattern(r"[ \t\n]{0,8}(?:-[ \t\n]{0,2})?")
# The text before a bare number that has a name.
LINKED = Pattern(
    r"(?i)(?:[:=(]|\b(?:of|is|are|was|at|ridge|points?|lies|near|about|around|be|to|value))[\s\"',*({\[~≈]*$"
)
KEY = Pattern(
    r"(?P<key>(?:[\w./' -]|\((?=[^()\n]{0,20}\)))(?:[^\n\d;|]|(?<=[A-Za-z])\d){0,40}?)[\"']?\s*(?:[:=(]|\b(?:of|is|are|was|at)\b)\s*[\"'({\[~≈]*$"
)


COUNTS = Pattern(
    r"[ \t]+(?!(?:and|or|for|on|in|at|with|so|as|is|are|but|while|which|by|from|to|the|then|total|only|here|each|max|if|per)\b)"
    r"[A-Za-z]{2}"
)


MAKES = Pattern(
    r"[\s,]*(?:(?:would|could|should|will) be|is|are|=|equals?|makes?|gives?|means?|comes to|i\.e\.,?|that is,?|so|or)"
    r"[\s:~≈]*(?:only |just |about )?"
)


class Spot(NamedTuple):
    """A number and its place. unit: None if no unit follows."""

    number: Number
    unit: str | None
    start: int
    end: int


@dataclass(frozen=True)
class Figure:
    """A number, its written unit (None for a bare number), and the words around it.

    before, after: the text up to the end of the clause, the next number or REACH characters. shared: whether another
    number ends that text. clause: the same text, with other numbers in it. label: the name that a key or a table gives
    to the number. share: the percentage of a peak or a rate in the same clause. start, end: the place in the text.
    """

    number: Number
    unit: str | None
    start: int
    end: int
    before: str = field(repr=False)
    after: str = field(repr=False)
    clause: str = field(repr=False)
    shared: tuple[bool, bool] = (False, False)
    label: str = ""
    share: float | None = None

    def says(self, cue: str, near: int = REACH) -> bool:
        """Return whether the cue describes this figure, within `near` characters, and not the number next to it."""
        for match in CUE[cue].finditer(self.before):
            theirs = self.shared[0] and nearer_to_first(self.before, match)
            if len(self.before) - match.end() <= near and not theirs:
                return True
        for match in CUE[cue].finditer(self.after):
            theirs = self.shared[1] and not nearer_to_first(self.after, match)
            if match.start() <= near and not theirs:
                return True
        return False

    @property
    def around(self) -> str:
        return f"{self.before} \x02 {self.after}"


def nearer_to_first(gap: str, word: re.Match) -> bool:
    """Return whether a word between two numbers belongs to the first. A comma or similar mark decides, and otherwise
    the distance."""
    before, after = SEPARATOR.search(gap[: word.start()]), SEPARATOR.search(gap[word.end() :])
    if bool(before) != bool(after):
        return after is not None
    return word.start() < len(gap) - word.end()


def figures(text: str, label: str = "", unit: str | None = None) -> Iterator[Figure]:
    """Return the figures of a levelled text with marked names. label, unit: the name and unit that a key or a table
    head gives to a bare number."""
    label = CAMEL.sub(" ", level(label)) if label else ""
    shares = list(SHARE.finditer(text))
    spoken = SHARE.sub(lambda match: " " * len(match[0]), text) if shares else text
    spots = list(spots_of(spoken))
    for at, spot in enumerate(spots):
        if spot.unit or label or LINKED.search(spoken, max(0, spot.start - 24), spot.start):
            left = spots[at - 1].end if at else 0
            right = spots[at + 1].start if at + 1 < len(spots) else len(spoken)
            figure = with_words(spoken, spot, left, right, label, unit)
            if figure.unit or figure.label:
                yield replace(figure, share=share_beside(text, shares, spot)) if shares else figure


def with_words(text: str, spot: Spot, left: int, right: int, label: str, unit: str | None) -> Figure:
    """Return the figure at a spot. left, right: where the neighbouring numbers end and begin."""
    start, end = spot.start, spot.end
    before, after = text[max(left, start - REACH) : start], text[end : min(right, end + REACH)]
    shared = (left > max(0, start - REACH), right < min(len(text), end + REACH))
    own_before, own_after = CLAUSE.split(before)[-1], CLAUSE.split(after)[0]
    shared = (shared[0] and own_before == before, shared[1] and own_after == after)
    clause = f"{CLAUSE.split(text[max(0, start - REACH) : start])[-1]}\x02{CLAUSE.split(text[end : end + REACH])[0]}"
    name = label or ("" if spot.unit or counts_something(own_after) else key_before(own_before))
    if label:
        own_before = f"{label} = {own_before}"
    return Figure(spot.number, spot.unit or unit, start, end, own_before, own_after, clause, shared, name)


def counts_something(after: str) -> bool:
    """Return whether the number counts the noun after it, as in "15.6 instructions" or "19 cases"."""
    return COUNTS.match(after) is not None


def key_before(text: str) -> str:
    """Return the name before a bare number: "SM count" for "with an SM count of", "num sms" for '"num_sms":'."""
    if RIDGE.search(text):
        return "ridge point"
    match = KEY.search(text)
    return CAMEL.sub(" ", match["key"]) if match else ""


def share_beside(text: str, shares: list[re.Match], spot: Spot) -> float | None:
    """Return the percentage of a peak that the figure is: "90 % of the peak would be 4.3 TB/s". An achieved rate may
    also have a share next to it; it does not count."""
    percentages = (float(share["pct"]) for share in shares if MAKES.fullmatch(text, share.end(), spot.start))
    return next(percentages, None)


def spots_of(text: str) -> Iterator[Spot]:
    """Yield the spots of all numbers. Numbers of a range share the unit of the last one. A number in words counts
    only if a unit follows."""
    for group in NUMBERS.finditer(text):
        unit, end = unit_after(text, group.end())
        if unit is None and text[group.end() : group.end() + 1].isalnum():
            yield from thousands(text, group)
            continue
        ones = list(NUMBER.finditer(text, group.start(), group.end()))
        for one in ones:
            start = one.start()
            if " " in one[0] and one[0][0].isdigit() and VERSIONED.search(text, max(0, start - 20), start):
                start += one[0].index(" ") + 1
            number = read_number(text[start : one.end()])
            if number and (unit or one[0][0].isdigit() or number.value > LEAST_SPELLED):
                yield Spot(number, unit, start, end if one is ones[-1] else one.end())


def thousands(text: str, group: re.Match) -> Iterator[Spot]:
    """Return the multiplier of "64K registers". Any other number with a letter after it is part of a word."""
    unit, end = unit_after(text, group.end() + 1)
    number = read_number(group[0])
    if text[group.end()] in "kK" and unit in COUNTED and number:
        yield Spot(replace(number, value=1024 * number.value), unit, group.start(), end)


def unit_after(text: str, at: int) -> tuple[str | None, int]:
    return unit_at(text, BEFORE_UNIT.match(text, at).end()) or (None, at)


def scope_of(figure: Figure) -> str | None:
    """Return whether the figure is of an SM, a block or a thread, from the nearest words."""
    scopes = []
    for scope, pattern in SCOPES.items():
        scopes += [(len(figure.before) - match.end(), scope) for match in pattern.finditer(figure.before)]
        scopes += [(match.start(), scope) for match in pattern.finditer(figure.after)]
    near = [(far, scope) for far, scope in scopes if far <= SCOPE_REACH]
    return min(near)[1] if near else ("sm" if SM_HAS.search(figure.clause) else None)


def sizes_of(figure: Figure) -> list[str]:
    """Return the memories whose capacity a size can be, from the words around it. The list is empty if the text
    speaks of data."""
    named = [BY_NAME[name] for name in SIZES_OF]
    if figure.label:
        return [quantity.name for quantity in named if quantity.words.search(figure.label)]
    if DATA_BEFORE.search(figure.before) or DATA_AFTER.match(figure.after):
        return []
    at = OF.match(figure.after).end()
    for quantity in named:
        match = quantity.words.match(figure.after, at)
        if match and not DATA_NOUN.match(figure.after[match.end() :]):
            return [quantity.name]
    for quantity in named:
        if any(LINK.fullmatch(figure.before, match.end()) for match in quantity.words.finditer(figure.before)):
            return [quantity.name]
    if DEVICE_HAS.search(figure.before):
        return ["memory"]
    if figure.says("most", SCOPE_REACH) or scope_of(figure):  # "shared memory: 228 KB per SM and 227 KB per block"
        return [quantity.name for quantity in named if quantity.words.search(figure.clause)]
    return []
