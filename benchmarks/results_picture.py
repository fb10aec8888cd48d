#!/usr/bin/env python3
"""docs/results.svg from docs/results.json and docs/results-h100.json: the share of its floor that each kernel reaches,
on each problem and card.

python benchmarks/results_picture.py        writes docs/results.svg
The floor of memory-bound work is at the rate of a copy, that of a product at the rate of a library's large product, so
a share can pass 100 %. Where no library is an opponent, its mark is missing."""

import argparse
import html
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from kernelopt import cli
from kernelopt.measure import baselines

LEFT, WIDTH, GAP, ROW, TOP, FOOT = 250, 430, 20, 22, 78, 30  # WIDTH of a card's column
CARDS = {"NVIDIA H200": "results.json", "NVIDIA H100 SXM": "results-h100.json"}
FULL_PCT = 120.0  # at the right end
KINDS = {
    "ours": "this bundle's kernel",
    "library": "best library or public kernel",
    "compiled": "torch.compile, the faster mode",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.page { fill: #ffffff }
.grid { stroke: #d1d9e0 }
.floor { stroke: #59636e; stroke-dasharray: 4 3 }
.ours { fill: #1a7f37 }
.library { fill: none; stroke: #bc4c00; stroke-width: 2 }
.compiled { fill: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .page { fill: #0d1117 }
  .grid { stroke: #3d444d }
  .floor { stroke: #9198a1 }
  .ours { fill: #3fb950 }
  .library { stroke: #f0883e }
  .compiled { fill: #4493f8 }
}
"""


@dataclass(frozen=True)
class Shares:
    """Percent of the floor that each kind of KINDS reaches on a problem; a kind that was not measured is missing."""

    name: str
    of_kind: dict[str, float]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    (ROOT / "docs" / "results.svg").write_text(picture(measured()))
    return 0


def measured() -> dict[str, list[Shares]]:
    """Card -> its problems, of the kernels that are right."""
    rows = {card: json.loads((ROOT / "docs" / file).read_text()) for card, file in CARDS.items()}
    return {card: [shares(row) for row in of_card if row["status"] == "OK"] for card, of_card in rows.items()}


def shares(row: dict) -> Shares:
    times: dict[str, list[float]] = {"ours": [row["ours_us"]], "library": [], "compiled": []}
    for name, result in row["against"].items():
        kind = "compiled" if name.startswith("torch.compile") else "library" if name not in baselines.MODES else None
        if kind and "us" in result:  # each opponent's ratio to ours holds, its time is from another run
            times[kind].append(row["ours_us"] * result["speedup"]["point"])
    return Shares(row["name"], {kind: 100 * row["floor_us"] / min(of) for kind, of in times.items() if of})


def picture(by_card: dict[str, list[Shares]]) -> str:
    names = list(dict.fromkeys(problem.name for problems in by_card.values() for problem in problems))
    width, height = LEFT + len(by_card) * (WIDTH + GAP), TOP + ROW * len(names) + FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Share of the floor by problem and card"><style>{STYLE}</style>',
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        '<text x="12" y="20">Share of the floor of that card; further right is faster</text>',
    ]
    for number, (kind, text) in enumerate(KINDS.items()):
        at = LEFT + 240 * number
        lines += [mark(kind, at, 38), f'<text x="{at + 12}" y="43">{text}</text>']
    for number, name in enumerate(names):
        lines.append(f'<text x="{LEFT - 10}" y="{middle(number) + 4:.0f}" text-anchor="end">{html.escape(name)}</text>')
    for number, (card, problems) in enumerate(by_card.items()):
        left = LEFT + number * (WIDTH + GAP)
        lines += [f'<text x="{left}" y="{TOP - 10}">{card}</text>', *grid(left, height)]
        for problem in problems:
            y = middle(names.index(problem.name))
            lines += [mark(kind, place(share, left), y) for kind, share in reversed(problem.of_kind.items())]
    return "\n".join([*lines, "</svg>\n"])


def grid(left: float, height: int) -> Iterator[str]:
    """A line every 20 %, with its label."""
    for percent in range(0, int(FULL_PCT) + 1, 20):
        x, kind = place(percent, left), "floor" if percent == 100 else "grid"
        yield f'<line class="{kind}" x1="{x:.0f}" y1="{TOP}" x2="{x:.0f}" y2="{height - FOOT}"/>'
        yield f'<text x="{x:.0f}" y="{height - 10}" text-anchor="middle">{percent} %</text>'


def middle(row: int) -> float:
    return TOP + ROW * (row + 0.5)


def place(percent: float, left: float) -> float:
    return left + (WIDTH - 30) * min(percent, FULL_PCT) / FULL_PCT


def mark(kind: str, x: float, y: float) -> str:
    """A circle, a square or a diamond: kinds differ without colours too."""
    if kind == "library":
        return f'<rect class="library" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"/>'
    if kind == "compiled":
        return f'<path class="compiled" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>'
    return f'<circle class="ours" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>'


if __name__ == "__main__":
    cli.run(main)
