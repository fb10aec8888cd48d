"""Functions that cut Markdown and JSON into the pieces that are audited. All functions are pure."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from .citations import Piece
from .units import Pattern, canonical
from .wording import level

# --- Markdown ------------------------------------------------------------------------------------------------------

HEADING = Pattern(r" {0,3}(#{1,6})\s+(.*?)[\s#]*$")
FENCE = Pattern(r"\s*(`{3,}|~{3,})")
ITEM = Pattern(r"\s*(?:[-*+]|\d+[.)])\s")
QUOTED = Pattern(r"(?m)^\s*(?:>\s?)+")
RULE = Pattern(r"\s*\|?(?:\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?\s*")
CELL = Pattern(r"(?:\\.|[^|\\])+")
ALONE = Pattern(r"[^\w]*\d[\d.,_' +^x*eE-]*[^\d\n]{0,16}")  # a number with a unit or at most two words
UNIT_NAMED = Pattern(r"\(([^()]*)\)|\[([^\[\]]*)\]|,\s*([^,]+)$|\bin\s+(\S+)$")
WORDS_OF_ROW = 2  # cells of words that name the numbers behind them
LONGEST_TABLE = 2000  # rows; a longer table is data


def of_markdown(text: str, used: Callable[[str], bool]) -> Iterator[Piece]:
    """Yield headings, paragraphs, list items, table rows and lines of fenced code. used: whether values below a
    given heading are used."""
    lines = text.splitlines()
    depth = 7  # of the heading below which values are used
    for kind, first, last in blocks(lines):
        if kind == "heading":
            level, title = len(HEADING.match(lines[first])[1]), HEADING.match(lines[first])[2].lower()
            if level <= depth:
                depth = level if used(title) else 7
        here = depth < 7 or used("")
        if kind == "fence":
            yield from (Piece(lines[at], at + 1, -1, used=here) for at in range(first, last))
        elif kind == "table" and last - first < LONGEST_TABLE:
            yield from of_table([(at + 1, lines[at]) for at in range(first, last)], here)
        else:
            yield Piece(unquoted("\n".join(lines[first:last])), first + 1, used=here)


def blocks(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, first line, line after the last) of Markdown blocks. The kind is heading, fence, table or text.
    Blank lines separate the blocks."""
    at = 0
    while at < len(lines):
        kind, end = "text", at + 1
        if fence := FENCE.match(lines[at]):
            kind, at = "fence", at + 1
            end = next((n for n in range(at, len(lines)) if lines[n].strip().startswith(fence[1])), len(lines))
        elif HEADING.match(lines[at]):
            kind = "heading"
        elif is_table(lines, at):
            kind = "table"
            while end < len(lines) and "|" in lines[end]:
                end += 1
        elif lines[at].strip():
            while end < len(lines) and goes_on(lines, end):
                end += 1
        if kind != "text" or lines[at].strip():
            yield kind, at, end
        at = end + (kind == "fence")


def is_table(lines: list[str], at: int) -> bool:
    return lines[at].lstrip().startswith("|") or (
        "|" in lines[at] and at + 1 < len(lines) and "|" in lines[at + 1] and RULE.fullmatch(lines[at + 1]) is not None
    )


def goes_on(lines: list[str], at: int) -> bool:
    """Return whether a line continues the paragraph of the line before."""
    line = lines[at]
    return bool(line.strip()) and not (
        FENCE.match(line) or HEADING.match(line) or ITEM.match(line) or is_table(lines, at)
    )


def unquoted(text: str) -> str:
    """Remove the marks of a quotation and keep the columns."""
    return QUOTED.sub(lambda match: " " * len(match[0]), text) if ">" in text else text


def of_table(rows: list[tuple[int, str]], used: bool) -> Iterator[Piece]:
    """Yield each cell. A number alone gets the label from its column head, the words before it in its row and the
    cell after it."""
    ruled = len(rows) > 1 and RULE.fullmatch(rows[1][1]) is not None
    heads = [head[0].strip() for head in cells(rows[0][1])] if ruled else []
    if ruled:
        yield from (Piece(cell[0], rows[0][0], cell.start(), used=used) for cell in cells(rows[0][1]))
    for line, row in rows[2:] if ruled else rows:
        yield from of_row(line, cells(row), heads, used)


def of_row(line: int, row: list[re.Match], heads: list[str], used: bool) -> Iterator[Piece]:
    words: list[str] = []
    for at, cell in enumerate(row):
        if ALONE.fullmatch(level(cell[0])):
            names = [*words[:WORDS_OF_ROW], *heads[at : at + 1]]
            behind = [row[at + 1][0].strip()] if at + 1 < len(row) else []
            unit = next(filter(None, map(unit_named, [*behind, *reversed(names)])), None)
            yield Piece(cell[0], line, cell.start(), " ".join(names), unit, used)
        else:
            words.append(cell[0].strip())
            yield Piece(cell[0], line, cell.start(), used=used)


def cells(row: str) -> list[re.Match]:
    row = row.rstrip().removesuffix("|")
    body = len(row) - len(row.lstrip())
    return list(CELL.finditer(row, body + 1 if row[body : body + 1] == "|" else body))


def unit_named(text: str) -> str | None:
    """Return the unit in a table head: GB/s for "bandwidth (GB/s)", "bandwidth, GB/s" or "GB/s"."""
    named = (part for match in UNIT_NAMED.finditer(level(text)) for part in match.groups())
    return next(filter(None, (canonical(part) for part in [level(text), *filter(None, named)])), None)


# --- JSON ----------------------------------------------------------------------------------------------------------


def of_json(value, used: bool, label: str = "", numbers: bool = True) -> Iterator[Piece]:
    """Yield strings, and numbers with their key. In {"metric": NAME, "target": N}, NAME is the label of N. The lines
    are unknown."""
    if isinstance(value, dict):
        named = value.get("metric") if isinstance(value.get("metric"), str) else ""
        for key, inner in value.items():
            yield from of_json(inner, used, named if named and key != "metric" else str(key), numbers)
    elif isinstance(value, list):
        for inner in value:
            yield from of_json(inner, used, label, numbers)
    elif isinstance(value, str):
        alone = ALONE.fullmatch(level(value)) is not None
        yield Piece(value, column=-1, label=label if alone else "", used=used)
    elif numbers and isinstance(value, int | float) and not isinstance(value, bool):
        yield Piece(str(value), column=-1, label=label, used=used)


def located(pieces: list[Piece], text: str, line: int = 1) -> Iterator[Piece]:
    """Add line numbers to the pieces of a JSON text, which are in its order. `line` is the line of the first
    character."""
    at = 0
    for piece in pieces:
        forms = (json.dumps(piece.text, ensure_ascii=False), json.dumps(piece.text), piece.text)
        form = next((form for form in forms if text.find(form, at) >= 0), "")
        start = text.find(form, at)
        line += text.count("\n", at, start)
        yield replace(piece, line=line)
        line, at = line + form.count("\n"), start + len(form)
