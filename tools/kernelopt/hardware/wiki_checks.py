"""Checks of the wiki's pages: required rows, units, sources, plausible values, links, index, tags of figures, cases.

Each check takes its inputs and returns one sentence per defect. An empty list means that there are no defects.
"""

import re
from pathlib import Path

from . import occupancy, wiki, wiki_case_checks, wiki_figures, wiki_rows
from .wiki import Page

UNITS = set(
    "SM CU XCD threads warps wavefronts blocks registers lanes columns bytes KB MB GB GB/s MHz W TFLOPS TOPS bit "
    "-".split()
)
KINDS = {
    "datasheet",
    "whitepaper",
    "programming guide",
    "ISA manual",
    "vendor documentation",
    "vendor blog",
    "vendor header",
    "vendor repository",
    "device query",
    "measured",
    "secondary",
}
HOW_READ = {"transcribed", "derived"}
REQUIRED = (
    "memory_capacity memory_bandwidth l2_capacity boost_clock tdp peak_fp64 peak_fp32 peak_fp16_tensor "
    "peak_bf16_tensor peak_fp8_tensor peak_int8_tensor"
).split()
REQUIRED_OF = {"NVIDIA": ["compute_capability", "sm_count"], "AMD": ["gfx_target", "cu_count"]}
# Beside the rows that occupancy rests on.
REQUIRED_LIMITS = {"NVIDIA": ("threads_per_sm", "fp32_lanes_per_sm")}
# Lowest and highest value that a GPU of the last decade can have: a misplaced decimal point or unit falls outside.
RANGES = {
    "sm_count": (16, 200),
    "cu_count": (60, 320),
    "memory_capacity": (8, 600),
    "memory_bandwidth": (200, 25_000),
    "memory_bandwidth_highest": (200, 25_000),
    "memory_clock": (400, 20_000),
    "memory_bus_width": (64, 16_384),
    "l2_capacity": (2, 300),
    "boost_clock": (1000, 3500),
    "tdp": (50, 3000),
    "peak_fp64": (0.2, 200),
    "peak_fp32": (5, 300),
    "peak_fp16_tensor": (40, 6000),
    "peak_bf16_tensor": (40, 6000),
    "peak_tf32_tensor": (20, 3000),
    "peak_fp8_tensor": (100, 12_000),
    "peak_fp4_tensor": (300, 40_000),
    "peak_int8_tensor": (100, 12_000),
}
AGREE_WITHIN = 0.02
EXPLAIN = "say in its note which source disagrees"


def problems(root: Path) -> list[str]:
    """Return every defect of the wiki in `root`. Raise UsageError if a page cannot be read."""
    products, limits = wiki.pages(root), wiki.limit_pages(root)
    defects = [f"{page.file}: {text}" for page in products for text in of_product(page)]
    defects += [f"{page.file}: {text}" for page in limits.values() for text in of_limits(page)]
    for page in [*products, *limits.values()]:
        text = (root / page.file).read_text(encoding="utf-8")
        defects += [f"{page.file}: {text}" for text in sources(page, text)]
    defects += same_name_twice(products) + named_with_limits(root, products) + links(root) + index(root)
    return defects + wiki_figures.problems(root) + wiki_case_checks.problems(root)


def of_product(page: Page) -> list[str]:
    """Rows, units and values of a product's page."""
    defects = [f"{name} is missing" for name in [*REQUIRED, *REQUIRED_OF.get(page.vendor, [])] if name not in page.rows]
    if page.limits is None:
        defects.append(f"there is no page limits/{page.limits_key()}.md")
    else:
        twice = sorted(set(page.rows) & set(page.limits.rows))
        defects += [f"{name} is also on the page of the limits" for name in twice]
    return defects + cells(page) + units(page) + plausible(page) + variants(page) + agreement(page)


def of_limits(page: Page) -> list[str]:
    """Rows and units of a limits page."""
    required = (*occupancy.needed(page), *REQUIRED_LIMITS.get(page.vendor, ()))
    return [f"{name} is missing" for name in required if name not in page.rows] + cells(page)


def cells(page: Page) -> list[str]:
    """Unit, source and kind of each row."""
    defects = []
    for row in page.rows.values():
        if re.search(r"\s", row.text):
            defects.append(f"L{row.line}: {row.metric}: '{row.text}' contains a blank and cannot be cited")
        if row.unit not in UNITS:
            defects.append(f"L{row.line}: {row.metric}: '{row.unit}' is no unit of this wiki")
        if row.text == "UNKNOWN":
            if (row.source, row.kind) != ("-", "-"):
                defects.append(f"L{row.line}: {row.metric}: an UNKNOWN value must have no source")
            continue
        if not re.fullmatch(r"\[[a-z0-9-]+\]", row.source):
            defects.append(f"L{row.line}: {row.metric}: '{row.source}' names no source")
        kind, *how = row.kind.split(", ")
        if kind not in KINDS or not set(how) <= HOW_READ:
            defects.append(f"L{row.line}: {row.metric}: '{row.kind}' is no kind of source")
    return defects


def units(page: Page) -> list[str]:
    """Check that each row has the unit that its name requires."""
    defects = []
    for row in page.rows.values():
        unit = wiki_rows.unit_of(row.metric)
        if unit and row.unit != unit:
            defects.append(f"L{row.line}: {row.metric} is in {row.unit}; its unit must be {unit}")
    return defects


def variants(page: Page) -> list[str]:
    """Check rows that belong together. The highest documented bandwidth is above the used one. A peak with fp16
    accumulation is one to two times the peak with fp32 accumulation."""
    defects = []
    highest, used = page.known("memory_bandwidth_highest"), page.known("memory_bandwidth")
    if highest and used and highest.value <= used.value:
        defects.append(f"L{highest.line}: memory_bandwidth_highest is not above memory_bandwidth, {used.text}")
    for row in page.rows.values():
        full = page.known(row.metric.removesuffix("_fp16_accumulate"))
        if full is None or full is row or not row.known:
            continue
        if not full.value <= row.value <= full.value * 2 * (1 + AGREE_WITHIN):
            defects.append(f"L{row.line}: {row.metric} is not one to two times {full.metric}, {full.text}")
    return defects


def plausible(page: Page) -> list[str]:
    """Check that values are within the possible range of a GPU. A sparse peak is twice the dense one, or a note
    explains it."""
    defects = []
    for metric, (low, high) in RANGES.items():
        row = page.known(metric)
        if row and not (isinstance(row.value, int | float) and low <= row.value <= high):
            defects.append(f"L{row.line}: {metric}: {row.text} is outside {low} to {high} {row.unit}")
    for row in page.rows.values():
        dense = page.known(row.metric.removesuffix("_sparse"))
        if not row.metric.endswith("_sparse") or not row.known or not dense or "disagrees" in row.note:
            continue
        if abs(row.value / dense.value / 2 - 1) > AGREE_WITHIN:
            defects.append(f"L{row.line}: {row.metric} is not twice {dense.metric}; {EXPLAIN}")
    return defects


def agreement(page: Page) -> list[str]:
    """Check the bandwidth against bus and clock, and the fp32 peak against lanes and clock. Both must agree within 2
    %, unless a note says `disagrees`."""
    defects = []
    for metric, (expected, formula) in wiki_rows.derived(values_of(page)).items():
        row = page.known(metric)
        if row and abs(row.value / expected - 1) > AGREE_WITHIN and "disagrees" not in row.note:
            defects.append(f"L{row.line}: {metric} is {row.text}, {formula} gives {expected:.4g}; {EXPLAIN}")
    return defects


def values_of(page: Page) -> dict[str, int | float | str]:
    """Return the known values of a page and of its limits."""
    return {name: row.value for name, row in page.all_rows().items() if row.known}


def sources(page: Page, text: str) -> list[str]:
    """Return the sources that a row names and the page does not list, and the listed sources that no row names."""
    listed = re.findall(r"^- (\[[a-z0-9-]+\]): \S", text, re.MULTILINE)
    named = {row.source for row in page.rows.values() if row.source != "-"}
    mentioned = set(re.findall(r"\[[a-z0-9-]+\](?!\()", text.partition("## Sources")[0]))
    defects = [f"{source} is not listed under Sources" for source in sorted(named - set(listed))]
    defects += [f"{source} is listed and never used" for source in listed if source not in mentioned]
    return defects + [f"{source} is listed twice" for source in sorted({s for s in listed if listed.count(s) > 1})]


def same_name_twice(products: list[Page]) -> list[str]:
    """Return the names that two products share."""
    owners: dict[str, str] = {}
    defects = []
    for page in products:
        for name in wiki.spellings(page):
            if owners.setdefault(name, page.platform) != page.platform:
                defects.append(f"'{name}' is a name of {owners[name]} and of {page.platform}")
    return defects


def named_with_limits(root: Path, products: list[Page]) -> list[str]:
    """Return the products that the page of their limits does not name. A search by a product finds its limits so."""
    defects = []
    for page in products:
        if page.limits:
            above, _, _ = (root / page.limits.file).read_text(encoding="utf-8").partition(wiki.HEADER)
            if not re.search(rf"[:,] {re.escape(page.platform)}[,.]", above):
                defects.append(f"{page.limits.file}: its first lines do not name {page.platform}")
    return defects


def links(root: Path) -> list[str]:
    """Return the relative links to files that do not exist."""
    defects = []
    for path in sorted(root.rglob("*.md")):
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if "://" not in target and not (path.parent / target.partition("#")[0]).exists():
                defects.append(f"{path.relative_to(root)}: the target of the link {target} does not exist")
    return defects


def index(root: Path) -> list[str]:
    """Return the pages that the index omits."""
    text = (root / "README.md").read_text(encoding="utf-8") if (root / "README.md").is_file() else ""
    linked = {str(Path(target.partition("#")[0])) for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    pages = sorted(str(path.relative_to(root)) for path in (root / "docs").rglob("*.md"))
    return [f"README.md does not link {page}" for page in pages if page not in linked]
