"""Measured and cited figures in the wiki's pages of advice, and the tags that say where each comes from.

A figure is a number with a unit of time, of a rate or of a ratio: 260 us, 4.48 TB/s, 1.16x, 85 %. Its tag is a card,
and a month (2026-11), an example, a command, or an address. It stands in the same paragraph or list item. A table and
an indented paragraph take the tag of the paragraph or item above them. A pitfall (Attempted, Observed, Cause, Lesson)
is one experiment: the tag of its Observed counts for all of it. A threshold of reference/thresholds.json, its value
before its name as in "80 % (`saturated_pct`)", is no figure: its source stands in that file.
"""

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from . import wiki

FOLDERS = ("operators", "optimization", "frameworks", "pitfalls", "errors", "practice")
UNIT = r"(?:ns|us|ms|seconds?|[GT]B/s|TFLOPS|TOPS|%)"
NUMBER = r"\d(?:[\d.,]*\d)?"
FIGURE = re.compile(rf"(?<![\w.]){NUMBER} ?{UNIT}(?![\w%]| ?\d)|(?<![\w.])\d+(?:\.\d+)?x(?!\w)")
IN_HEADER = re.compile(rf"(?:^|[\s,(]){UNIT}(?:$|[\s,)])|\bratio\b")  # a table's column of figures
ORIGIN = re.compile(r"\b20\d\d-\d\d\b|`examples/\w+`|`(?:tools/)?\w+\.py\b|https?://")
THRESHOLD = re.compile(rf"({NUMBER}) ?{UNIT} \(`(\w+)`\)")
OBSERVED = "- **Observed:**"  # the item of a pitfall that has its figures


@dataclass(frozen=True)
class Block:
    """A paragraph, a list item or a table. line: its first. context: where its tag may stand. header: the first row of
    a table."""

    line: int
    text: str
    context: str
    header: str = ""


def problems(root: Path) -> list[str]:
    """Return a sentence for each figure without a tag."""
    cards = cards_of(root)
    pages = [page for folder in FOLDERS for page in sorted((root / "docs" / folder).glob("*.md"))]
    return [defect for page in pages for defect in untagged(page, str(page.relative_to(root)), cards)]


def cards_of(root: Path) -> re.Pattern:
    """Return the pattern of the wiki's products, each by the first word of its name: H200, RTX, MI300X."""
    names = sorted({page.platform.split()[0] for page in wiki.pages(root)})
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")


def untagged(page: Path, name: str, cards: re.Pattern) -> list[str]:
    """Return a sentence for each block of a page that has a figure and no tag. name: of the page in the wiki."""
    return [
        f"{name}: L{block.line}: '{figure}' has no tag: a card, and a month, an example, a command or an address"
        for block in blocks(page.read_text(encoding="utf-8"))
        if (figure := figure_of(block)) and not (cards.search(block.context) and ORIGIN.search(block.context))
    ]


def figure_of(block: Block) -> str | None:
    """Return the first figure of a block: a number with its unit, or a number below a unit in a table's header."""
    prose = re.sub(r"`[^`\n]*`", "", THRESHOLD.sub(without_threshold, block.text))
    if in_prose := FIGURE.search(prose):
        return in_prose[0]
    in_cell = re.search(rf"\| *({NUMBER}) *\|", prose) if IN_HEADER.search(block.header) else None
    return in_cell and in_cell[1]


def without_threshold(match: re.Match) -> str:
    """Return the name of a threshold whose value was quoted; what was matched, if no threshold has name and value."""
    value, name = match.groups()
    return f"`{name}`" if thresholds().get(name) == value else match[0]


@functools.cache
def thresholds() -> dict[str, str]:
    """Return {name: value as pages write it} of reference/thresholds.json."""
    rows = bundle.read_json(bundle.REFERENCE / "thresholds.json")["thresholds"]
    return {name: f"{row['value']:g}" for name, row in rows.items()}


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page, without its code and its sources."""
    lines = without_code(text.partition("\n## Sources\n")[0])
    starts = [0, *(number for number, line in enumerate(lines) if line.startswith("#")), len(lines)]
    for first, end in itertools.pairwise(starts):
        yield from blocks_of_section(lines[first:end], first + 1)


def blocks_of_section(lines: list[str], start: int) -> Iterator[Block]:
    """Yield the blocks of a section. start: the number of its first line in the page."""
    parts = list(pieces(lines, start))
    observed = "".join("\n".join(piece) for _, piece in parts if piece[0].startswith(OBSERVED))
    above = ""
    for number, piece in parts:
        text, table = "\n".join(piece), piece[0].startswith("|")
        above = f"{above}\n{text}" if table or piece[0].startswith("  ") else text
        yield Block(number, text, f"{observed}\n{above}", piece[0] if table else "")


def pieces(lines: list[str], start: int) -> Iterator[tuple[int, list[str]]]:
    """Yield each paragraph, list item and table: the number of its first line, and its lines."""
    piece = []
    for number, line in enumerate([*lines, ""], start):
        if piece and (not line.strip() or line.startswith("- ")):
            yield number - len(piece), piece
            piece = []
        if line.strip() and not line.startswith("#"):
            piece.append(line)


def without_code(text: str) -> list[str]:
    """Return the lines of a page, those of its code blank."""
    in_code, lines = False, []
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        lines.append("" if in_code or fence else line)
    return lines
