#!/usr/bin/env python3
"""Write what came of a run of the tests into docs/tested-with.md: tested_with.py COMMAND RESULT.xml...

RESULT.xml is what pytest --junitxml left, once or for each part of the run; COMMAND is the line that ran the tests. The
row of the same command, versions and device is replaced. scripts/test.sh --record calls this.
"""

import datetime
import importlib.metadata
import os
import platform
import sys
import xml.etree.ElementTree
from collections.abc import Iterable
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BUNDLE / "tools"))
from kernelopt import bundle
from kernelopt.device import gpu
from kernelopt.errors import EnvironmentLacks

PAGE = BUNDLE / "docs" / "tested-with.md"
BEGIN, END = "<!-- rows -->\n", "<!-- /rows -->"
COLUMNS = ("command", "device", "Python", "torch", "triton", "numpy", "date", "passed", "skipped", "failed", "minutes")
KEY = COLUMNS[:5]


def counted(results: Iterable[str]) -> dict[str, str]:
    """{passed, skipped, failed, minutes} of the texts of JUnit files of pytest, together; errors count as failed."""
    suites = [suite for result in results for suite in xml.etree.ElementTree.fromstring(result).iter("testsuite")]

    def total(name: str) -> int:
        return sum(int(suite.get(name)) for suite in suites)

    skipped, failed = total("skipped"), total("failures") + total("errors")
    return {
        "passed": str(total("tests") - skipped - failed),
        "skipped": str(skipped),
        "failed": str(failed),
        "minutes": f"{sum(float(suite.get('time')) for suite in suites) / 60:.1f}",
    }


def surroundings() -> dict[str, str]:
    """Device, versions and date of this run."""
    try:
        device = gpu.identify().name
    except EnvironmentLacks:
        device = f"CPU, {os.cpu_count()} cores"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy")}
    return {
        "device": device,
        "Python": platform.python_version(),
        **versions,
        "date": datetime.date.today().isoformat(),
    }


def with_row(page: str, row: dict[str, str]) -> str:
    """The page with this row in its table, in place of the one of the same key."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    rows = [
        dict(zip(COLUMNS, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        for line in table.splitlines()[2:]
    ]
    rows = [other for other in rows if any(other[name] != row[name] for name in KEY)]
    rows = sorted([*rows, row], key=lambda each: [each[name] for name in KEY])
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([each[name] for name in COLUMNS] for each in rows)]
    return before + BEGIN + "".join(f"| {' | '.join(line)} |\n" for line in lines) + END + after


def main(command: str, *results: str) -> None:
    found = counted(Path(result).read_text(encoding="utf-8") for result in results)
    row = {"command": f"`{command}`", **surroundings(), **found}
    bundle.write_text(PAGE, with_row(PAGE.read_text(encoding="utf-8"), row))
    print(f"docs/tested-with.md: {row['passed']} passed, {row['skipped']} skipped, {row['failed']} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
