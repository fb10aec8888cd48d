"""The hardware values of the wiki and their citations. No other place holds a hardware figure."""

import functools
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import bundle
from ..errors import Refused, UsageError

HEADER = "| metric | value | unit | source | kind | note |"


@dataclass(frozen=True)
class Row:
    """One hardware value: a table row of a page, and its line number (1 is the first)."""

    metric: str
    text: str
    unit: str
    source: str
    kind: str
    note: str
    page: str
    line: int
    root: str = "<gpu-wiki>"

    @property
    def known(self) -> bool:
        return self.text not in ("UNKNOWN", "UNSUPPORTED")

    @property
    def value(self) -> int | float | str | None:
        """The value, as a number if it is one, or None if it is unknown."""
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
        """`<metric>: <value> <unit> <- <gpu-wiki>/<page>:L<line>`, with <workspace> for a calibration, or the line
        for a missing value."""
        if self.text == "UNKNOWN":
            return missing(self.metric)
        unit = "" if self.unit == "-" else f" {self.unit}"
        return f"{self.metric}: {self.text}{unit} <- {self.root}/{self.page}:L{self.line}"


@dataclass(frozen=True)
class Page:
    """One product: its name, aliases and rows, and the limits of its compute capability or gfx target. The limits
    are a page of the same form; on such a page, they are None."""

    platform: str
    aliases: tuple[str, ...]
    architecture: str
    vendor: str
    rows: dict[str, Row] = field(repr=False)
    limits: "Page | None" = field(default=None, repr=False)

    @property
    def file(self) -> str:
        """The path inside the wiki."""
        return next(iter(self.rows.values())).page

    def all_rows(self) -> dict[str, Row]:
        """The rows of the page, then those of its limits. No metric is on both pages (wiki_checks)."""
        return {**self.rows, **(self.limits.rows if self.limits else {})}

    def row(self, metric: str) -> Row | None:
        return self.all_rows().get(metric)

    def known(self, metric: str) -> Row | None:
        """Return the row if it holds a value."""
        row = self.row(metric)
        return row if row and row.known else None

    def limits_key(self) -> str | None:
        """The name of its limits page: "sm_90", "gfx942"; None when the page names neither."""
        if target := self.rows.get("gfx_target"):
            return target.text
        capability = self.rows.get("compute_capability")
        return f"sm_{capability.text.replace('.', '')}" if capability else None


def missing(metric: str) -> str:
    """Return the text that replaces a value that the wiki does not hold."""
    return f"{metric}: UNKNOWN (gpu-wiki not found)"


def root(explicit: Path | str | None = None) -> Path:
    """Return the wiki's folder: `explicit`, else $GPU_WIKI, else the one in the bundle."""
    path = bundle.here(Path(explicit or os.environ.get("GPU_WIKI") or bundle.ROOT / "gpu-wiki"))
    if not (path / "docs" / "hardware").is_dir():
        raise UsageError(f"{path} is no gpu-wiki: it has no docs/hardware")
    return path


def pages(wiki: Path) -> list[Page]:
    """Return all products of the wiki, each with its limits, in the order of their file names."""
    limits = limit_pages(wiki)
    products = [read_page(path, wiki) for path in sorted((wiki / "docs" / "hardware").glob("*.md"))]
    return [replace(page, limits=limits.get(page.limits_key())) for page in products]


def limit_pages(wiki: Path) -> dict[str, Page]:
    """Return the limits of each compute capability and gfx target, by name: "sm_90", "gfx942"."""
    return {path.stem: read_page(path, wiki) for path in sorted((wiki / "docs" / "hardware" / "limits").glob("*.md"))}


def read_page(path: Path, wiki: Path) -> Page:
    return parse_page(path.read_text(encoding="utf-8"), str(path.relative_to(wiki)))


@functools.lru_cache(maxsize=512)  # a gate reads all pages twice, and an unattended loop many times
def parse_page(text: str, page: str, root: str = "<gpu-wiki>") -> Page:
    """Parse one page, which is at `page` below `root`. The UsageError names the line with the wrong format."""
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
        rows[cells[0]] = Row(*cells, page, index + 1, root)
    aliases = tuple(alias.strip() for alias in heads["Aliases"].split(";"))
    return Page(lines[0][2:].strip(), aliases, heads["Architecture"], heads["Vendor"], rows)


def normalised(name: str) -> str:
    """Return the name without case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def spellings(page: Page) -> set[str]:
    """Return all names of a product, normalised."""
    return {normalised(alias) for alias in (page.platform, *page.aliases)}


def find(name: str, products: list[Page]) -> Page:
    """Return the one product called `name`, and never a similar one.

    Raise Refused if several products match or none does. The message lists the matches, or products with similar names.
    """
    wanted = normalised(name)
    for page in products:
        if wanted in spellings(page):
            return page
    similar = [p.platform for p in products if wanted and any(wanted in normalised(a) for a in p.aliases)]
    if similar:
        raise Refused(f"'{name}' does not name one product exactly; did you mean: {', '.join(similar)}?")
    near = f"names like it: {', '.join(names_like_it)}; " if (names_like_it := nearest(wanted, products)) else ""
    raise Refused(
        f"'{name}' is not in the wiki, and no other product stands in for it; {near}"
        f"gpu_specs.py list prints all {len(products)}"
    )


def nearest(wanted: str, products: list[Page]) -> list[str]:
    """Return up to three products with similar names, the nearest first."""
    import difflib  # for a wrong name alone

    platforms = {spelling: page.platform for page in products for spelling in spellings(page)}
    close = difflib.get_close_matches(wanted, platforms, n=len(platforms))
    return list(dict.fromkeys(platforms[spelling] for spelling in close))[:3]


def product(name: str, gpu_wiki: Path | str | None = None) -> Page:
    """Call `find` on the wiki in that folder, or on the default wiki of `root`."""
    return find(name, pages(root(gpu_wiki)))


# The accepted range of a device's value: (least, most) as shares of the page's value. ECC takes up to 8 % of the
# capacity, and the page rounds the capacity. A board may allow a higher clock than the boost clock of its peaks.
DEVICE_RANGES = {
    "memory_capacity": (0.92, 1.05),
    "tdp": (0.98, 1.02),
    "l2_capacity": (0.99, 1.01),
    "boost_clock": (0.99, 1.5),
    "memory_clock": (0.99, 1.01),
}
EXACTLY = (1.0, 1.0)


@dataclass(frozen=True)
class Disagreement:
    """A value of a device that differs from its page."""

    metric: str
    device: float | str
    wiki: float | str
    citation: str


def disagreements(page: Page, values: dict[str, float | str]) -> list[Disagreement]:
    """Return the values of a device that differ from its page.

    values: metric -> value in the page's unit. A metric that the page does not have is no disagreement. A row
    `<metric>_lowest` is the least value of all boards of this product.
    """
    differing = []
    for metric, value in values.items():
        row = page.known(metric)
        if row is None or _agrees(value, row, page.known(f"{metric}_lowest")):
            continue
        differing.append(Disagreement(metric, value, row.value, row.citation))
    return differing


def _agrees(value: int | float | str, row: Row, lowest: Row | None) -> bool:
    if isinstance(value, str):
        return value == row.text
    least, most = DEVICE_RANGES.get(row.metric, EXACTLY)
    return least * (lowest or row).value <= value <= most * row.value
