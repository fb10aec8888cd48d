"""The hardware values of the wiki and their citations. No other place holds a hardware figure."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from . import bundle
from .errors import Refused, UsageError

HEADER = "| metric | value | unit | source | kind | note |"


@dataclass(frozen=True)
class Row:
    """One hardware value: a table row of a page, and the line it stands on (1 is the first)."""

    metric: str
    text: str
    unit: str
    source: str
    kind: str
    note: str
    page: str
    line: int

    @property
    def known(self) -> bool:
        return self.text not in ("UNKNOWN", "UNSUPPORTED")

    @property
    def value(self) -> int | float | str | None:
        """The value as a number where it is one; None where it is not known."""
        if not self.known:
            return None
        for kind in (int, float):
            try:
                return kind(self.text)
            except ValueError:
                continue
        return self.text

    @property
    def citation(self) -> str:
        """`<metric>: <value> <unit> <- <gpu-wiki>/<page>:L<line>`, or the line for a missing value."""
        if self.text == "UNKNOWN":
            return missing(self.metric)
        unit = "" if self.unit == "-" else f" {self.unit}"
        return f"{self.metric}: {self.text}{unit} <- <gpu-wiki>/{self.page}:L{self.line}"


@dataclass(frozen=True)
class Page:
    """One product: its name, the spellings it is known by, and its rows."""

    platform: str
    aliases: tuple[str, ...]
    architecture: str
    vendor: str
    rows: dict[str, Row] = field(repr=False)

    def row(self, metric: str) -> Row | None:
        return self.rows.get(metric)

    def known(self, metric: str) -> Row | None:
        """The row, when it holds a value."""
        row = self.rows.get(metric)
        return row if row and row.known else None


def missing(metric: str) -> str:
    """What is written in place of a value that the wiki does not hold."""
    return f"{metric}: UNKNOWN (gpu-wiki not found)"


def root(explicit: Path | str | None = None) -> Path:
    """The wiki's folder: `explicit`, else $GPU_WIKI, else the bundle's own."""
    path = Path(explicit or os.environ.get("GPU_WIKI") or bundle.ROOT / "gpu-wiki")
    if not (path / "docs" / "hardware").is_dir():
        raise UsageError(f"{path} is no gpu-wiki: it has no docs/hardware")
    return path


def pages(wiki: Path) -> list[Page]:
    """All products of the wiki, in the order of their file names."""
    files = sorted((wiki / "docs" / "hardware").glob("*.md"))
    return [parse_page(path.read_text(encoding="utf-8"), str(path.relative_to(wiki))) for path in files]


def parse_page(text: str, page: str) -> Page:
    """Read one page; UsageError names the line that breaks the format."""
    lines = text.splitlines()
    heads = dict(re.findall(r"^(Aliases|Architecture|Vendor): (.+)$", text, re.MULTILINE))
    if not lines or not lines[0].startswith("# ") or len(heads) != 3 or HEADER not in lines:
        raise UsageError(f"{page}: needs a title, Aliases, Architecture, Vendor and the table '{HEADER}'")
    rows: dict[str, Row] = {}
    for index in range(lines.index(HEADER) + 2, len(lines)):
        if not lines[index].startswith("|"):
            break
        cells = [cell.strip() for cell in lines[index].strip().strip("|").split("|")]
        if len(cells) != 6 or cells[0] in rows:
            raise UsageError(f"{page}:{index + 1}: a row has six cells, and a metric one row")
        rows[cells[0]] = Row(*cells, page=page, line=index + 1)
    aliases = tuple(alias.strip() for alias in heads["Aliases"].split(";"))
    return Page(lines[0][2:].strip(), aliases, heads["Architecture"], heads["Vendor"], rows)


def normalised(name: str) -> str:
    """Spelling without case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def spellings(page: Page) -> set[str]:
    """All names of a product, normalised."""
    return {normalised(alias) for alias in (page.platform, *page.aliases)}


def find(name: str, products: list[Page]) -> Page:
    """The one product called `name`. Never a similar one.

    Refused: several products could be meant (they are listed), or none is known (all are listed).
    """
    wanted = normalised(name)
    for page in products:
        if wanted in spellings(page):
            return page
    similar = [p.platform for p in products if wanted and any(wanted in normalised(a) for a in p.aliases)]
    if similar:
        raise Refused(f"'{name}' does not name one product exactly; did you mean: {', '.join(similar)}?")
    known = ", ".join(page.platform for page in products)
    raise Refused(f"'{name}' is not in the wiki, and no other product stands in for it; known: {known}")
