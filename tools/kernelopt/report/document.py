"""The blocks that a report is made of; each writes itself as HTML and as Markdown, so that both say the same.

Whatever comes out of a file is text: it is escaped where it is written.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .. import bundle
from ..audit.citations import CITATION
from ..session.version_names import VERSION
from . import plots

TEMPLATE = "report.html"
# Control characters, lone surrogates and what turns the direction of writing: shown, never obeyed.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
NAME_END = 24  # characters of a long name that stay at each end
SPECIAL = re.compile(r"[\\`*\[\]<|]")  # of Markdown, in text that is none
CITED = re.compile(f"`?(?P<citation>{CITATION.pattern})`?|{SPECIAL.pattern}")


def shown(value: str) -> str:
    """Text with characters that cannot be seen, or not be written, as \\uXXXX."""
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", value)


def escaped(value: str) -> str:
    """Text inside HTML."""
    return html.escape(shown(value))


class Name(str):
    """A long name that a compiler made. A page shows its two ends, and the whole name as a title."""

    def html(self) -> str:
        if len(self) <= 2 * NAME_END + 1:
            return escaped(self)
        return f'<span title="{escaped(self)}">{escaped(self[:NAME_END])}…{escaped(self[-NAME_END:])}</span>'


def cell(value: str) -> str:
    """The content of a cell in a table or a list of facts."""
    return value.html() if isinstance(value, Name) else escaped(value)


def plain(value: str) -> str:
    """Text inside Markdown, on one line. A citation, of which every character counts, is a code span."""
    return CITED.sub(written_special, " ".join(shown(value).split()))


def written_special(match: re.Match) -> str:
    citation = match["citation"]
    if citation and not set("|`") & set(citation):  # these would end the cell or the span
        return quoted(citation)
    return SPECIAL.sub(r"\\\g<0>", match[0])


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
        pairs = "".join(f"<dt>{escaped(name)}</dt><dd>{cell(value)}</dd>" for name, value in self.rows)
        return f"<dl>{pairs}</dl>"

    def markdown(self) -> str:
        return Table(("", ""), self.rows).markdown()


@dataclass(frozen=True)
class Link:
    """A file beside the page. words: the text before its name."""

    words: str
    name: str

    def html(self) -> str:
        return f'<p>{escaped(self.words)} <a href="{escaped(self.name)}">{escaped(self.name)}</a></p>'

    def markdown(self) -> str:
        return f"{plain(self.words)} [{plain(self.name)}]({self.name})"


@dataclass(frozen=True)
class Table:
    """Each cell carries the name of its column: on a phone a row is a card that names them."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    linked: bool = False  # the first column names versions that have a Fold on this page

    def html(self) -> str:
        head = "".join(f"<th>{escaped(cell)}</th>" for cell in self.head)
        rows = "".join(f"<tr>{''.join(self._cell(*place) for place in enumerate(row))}</tr>" for row in self.rows)
        return (
            f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        )

    def _cell(self, column: int, value: str) -> str:
        linked = self.linked and column == 0 and VERSION.match(value)
        content = f'<a href="#{value}">{value}</a>' if linked else cell(value)
        return f'<td data-head="{escaped(self.head[column])}">{content}</td>'

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
        """The whole file. Placeholders are filled in one pass, so that inserted text is not searched for them."""
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
