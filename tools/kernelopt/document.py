"""The blocks that a report is made of; each writes itself as HTML and as Markdown, so that both say the same.

Whatever comes out of a file is text: it is escaped where it is written.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from . import bundle, plots
from .workspace import VERSION

TEMPLATE = "report.html"
# Control characters, lone surrogates and what turns the direction of writing: shown, never obeyed.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
SPECIAL = re.compile(r"([\\`*\[\]<|])")  # of Markdown, in text that is none


def shown(value: str) -> str:
    """Text with characters that cannot be seen, or not be written, as \\uXXXX."""
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", value)


def escaped(value: str) -> str:
    """Text inside HTML."""
    return html.escape(shown(value))


def plain(value: str) -> str:
    """Text inside Markdown, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(shown(value).split()))


def quoted(value: str) -> str:
    """Text as a code span of Markdown, which no run of backticks in it ends."""
    words = " ".join(shown(value).split())
    fence = "`" * (longest_run(words) + 1)
    return f"{fence} {words} {fence}" if "`" in words else f"`{words}`"


def longest_run(value: str) -> int:
    """Length of the longest run of backticks."""
    return max((len(run) for run in re.findall("`+", value)), default=0)


@dataclass(frozen=True)
class Text:
    """A paragraph. tone: "", "good", "bad" or "note"."""

    words: str
    tone: str = ""

    def html(self) -> str:
        return f'<p class="{self.tone}">{escaped(self.words)}</p>' if self.tone else f"<p>{escaped(self.words)}</p>"

    def markdown(self) -> str:
        return plain(self.words)


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    rows: Sequence[tuple[str, str]]

    def html(self) -> str:
        pairs = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in self.rows)
        return f"<dl>{pairs}</dl>"

    def markdown(self) -> str:
        return Table(("", ""), self.rows).markdown()


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    linked: bool = False  # the first column names versions that have a Fold on this page

    def html(self) -> str:
        head = "".join(f"<th>{escaped(cell)}</th>" for cell in self.head)
        rows = "".join(f"<tr>{''.join(self._cell(*cell) for cell in enumerate(row))}</tr>" for row in self.rows)
        return (
            f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        )

    def _cell(self, column: int, value: str) -> str:
        linked = self.linked and column == 0 and VERSION.match(value)
        return f'<td><a href="#{value}">{value}</a></td>' if linked else f"<td>{escaped(value)}</td>"

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join(f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines)


@dataclass(frozen=True)
class Citations:
    """Lines whose every character counts."""

    lines: Sequence[str]

    def html(self) -> str:
        return f"<ul>{''.join(f'<li><code>{escaped(line)}</code></li>' for line in self.lines)}</ul>"

    def markdown(self) -> str:
        return "\n".join(f"- {quoted(line)}" for line in self.lines)


@dataclass(frozen=True)
class Code:
    source: str
    language: str  # python or diff

    def html(self) -> str:
        lines = escaped(self.source).split("\n")
        if self.language == "diff":
            lines = [*lines[:2], *(diff_line(line) for line in lines[2:])]  # the first two name the files
        return f'<pre tabindex="0"><code>{chr(10).join(lines)}</code></pre>'

    def markdown(self) -> str:
        source = shown(self.source).rstrip("\n")
        fence = "`" * max(3, longest_run(source) + 1)
        return f"{fence}{self.language}\n{source}\n{fence}"


def diff_line(line: str) -> str:
    """An escaped line of a unified diff, with its class."""
    css = {"+": "added", "-": "removed", "@": "place"}.get(line[:1])
    return f'<span class="{css}">{line}</span>' if css else line


@dataclass(frozen=True)
class Figure:
    """A plot; Markdown has none."""

    chart: plots.Chart
    caption: str

    def html(self) -> str:
        return f"<figure>{plots.svg(self.chart)}<figcaption>{escaped(self.caption)}</figcaption></figure>"

    def markdown(self) -> str:
        return ""


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line that opens them. anchor: an id of this page, or ""."""

    title: str
    blocks: Sequence
    anchor: str = ""

    def html(self) -> str:
        mark = f' id="{escaped(self.anchor)}"' if self.anchor else ""
        body = "\n".join(block.html() for block in self.blocks)
        return f"<details><summary>{escaped(self.title)}</summary><div{mark}>{body}</div></details>"

    def markdown(self) -> str:
        return "\n\n".join([f"### {plain(self.title)}", *written(self.blocks)])


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence

    def html(self) -> str:
        body = "\n".join(block.html() for block in self.blocks)
        return f"<section><h2>{escaped(self.title)}</h2>\n{body}\n</section>"

    def markdown(self) -> str:
        texts = written(self.blocks)
        return "\n\n".join([f"## {plain(self.title)}", *texts]) if texts else ""


def written(blocks: Sequence) -> list[str]:
    return [text for block in blocks if (text := block.markdown())]


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    sections: Sequence[Section]

    def html(self) -> str:
        """The whole file. Placeholders are filled in one pass, so that none is found in what was filled in."""
        values = {
            "TITLE": escaped(self.title),
            "SUBTITLE": escaped(self.subtitle),
            "BODY": "\n".join(section.html() for section in self.sections),
        }
        template = (bundle.REFERENCE / TEMPLATE).read_text(encoding="utf-8")
        return re.sub("@(TITLE|SUBTITLE|BODY)@", lambda match: values[match[1]], template)

    def markdown(self) -> str:
        return "\n\n".join([f"# {plain(self.title)}", plain(self.subtitle), *written(self.sections)]) + "\n"

    def charts(self) -> list[plots.Chart]:
        return [block.chart for section in self.sections for block in section.blocks if isinstance(block, Figure)]
