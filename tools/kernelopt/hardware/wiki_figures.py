"""Measured and cited figures in the wiki's pages of advice, and the tags that say where each comes from.

A figure is a number with a unit of time, of a rate or of a ratio: 260 us, 4.48 TB/s, 1.16x, 85 %. Its tag is a card,
and a month (2026-11), an example, a command, or an address. It stands in the same paragraph or list item, or, for a
table, in the table or the paragraph above it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from . import wiki

FOLDERS = ("operators", "optimization", "frameworks", "pitfalls", "errors", "practice")
EXEMPT = "untagged_pages.json"
UNIT = r"(?:ns|us|ms|seconds?|[GT]B/s|TFLOPS|TOPS|%)"
NUMBER = r"\d(?:[\d.,]*\d)?"
FIGURE = re.compile(rf"(?<![\w.]){NUMBER} ?{UNIT}(?![\w%]| ?\d)|(?<![\w.])\d+(?:\.\d+)?x(?!\w)")
IN_HEADER = re.compile(rf"(?:^|[\s,(]){UNIT}(?:$|[\s,)])|\bratio\b")  # a table's column of figures
ORIGIN = re.compile(r"\b20\d\d-\d\d\b|`examples/\w+`|`(?:tools/)?\w+\.py\b|https?://")


@dataclass(frozen=True)
class Block:
    """A paragraph, a list item, or a table with the paragraph above it. line: the first of the paragraph, item or
    table. header: the table's first row."""

    line: int
    text: str
    header: str = ""


def problems(root: Path) -> list[str]:
    """Return a sentence for each figure without a tag, in the pages that are not exempt."""
    exempt, cards = exempt_pages(root), cards_of(root)
    pages = [page for folder in FOLDERS for page in sorted((root / "docs" / folder).glob("*.md"))]
    named = {page: str(page.relative_to(root)) for page in pages}
    return [defect for page, name in named.items() if name not in exempt for defect in untagged(page, name, cards)]


def cards_of(root: Path) -> re.Pattern:
    """Return the pattern of the wiki's products, each by the first word of its name: H200, RTX, MI300X."""
    names = sorted({page.platform.split()[0] for page in wiki.pages(root)})
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")


def exempt_pages(root: Path) -> list[str]:
    """Return the pages that are older than the tags: of untagged_pages.json, which another wiki need not have."""
    path = root / EXEMPT
    return bundle.read_json(path)["pages"] if path.is_file() else []


def untagged(page: Path, name: str, cards: re.Pattern) -> list[str]:
    """Return a sentence for each block of a page that has a figure and no tag. name: of the page in the wiki."""
    return [
        f"{name}: L{block.line}: '{figure}' has no tag: a card, and a month, an example, a command or an address"
        for block in blocks(page.read_text(encoding="utf-8"))
        if (figure := figure_of(block)) and not (cards.search(block.text) and ORIGIN.search(block.text))
    ]


def figure_of(block: Block) -> str | None:
    """Return the first figure of a block: a number with its unit, or a number below a unit in a table's header."""
    prose = re.sub(r"`[^`\n]*`", "", block.text)
    if found := FIGURE.search(prose):
        return found[0]
    in_cell = re.search(rf"\| *({NUMBER}) *\|", prose) if IN_HEADER.search(block.header) else None
    return in_cell and in_cell[1]


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page, without its code and its sources."""
    above, lines, start = "", [], 1
    for number, line in enumerate([*without_code(text.partition("\n## Sources\n")[0]), ""], 1):
        if line.startswith(("#", "- ")) or not line.strip():
            if lines:
                yield block(above, lines, start)
                above = "" if lines[0].startswith("|") else "\n".join(lines)
            lines = [line] if line.startswith("- ") else []
            above = "" if line.startswith("#") else above
            start = number
        else:
            start = start if lines else number
            lines.append(line)


def block(above: str, lines: list[str], start: int) -> Block:
    """Return the block of some lines; a table takes the paragraph above it with it."""
    text = "\n".join(lines)
    return Block(start, f"{above}\n{text}", lines[0]) if lines[0].startswith("|") else Block(start, text)


def without_code(text: str) -> list[str]:
    """Return the lines of a page, those of its code blank."""
    in_code, lines = False, []
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        lines.append("" if in_code or fence else line)
    return lines
