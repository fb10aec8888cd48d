#!/usr/bin/env python3
"""Write what came of a run of the tests into docs/tested-with.md: tested_with.py RESULT.xml COMMAND.

RESULT.xml is what pytest --junitxml left, COMMAND the line that ran the tests. The row of the same command, versions
and device is replaced. scripts/test.sh --record calls this.
"""

import datetime
import importlib.metadata
import os
import platform
import sys
import xml.etree.ElementTree
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


def counted(result: str) -> dict[str, str]:
    """{passed, skipped, failed, minutes} of the text of a JUnit file of pytest; errors count as failed."""
    (suite,) = xml.etree.ElementTree.fromstring(result).iter("testsuite")
    tests, skipped, failures, errors = (int(suite.get(name)) for name in ("tests", "skipped", "failures", "errors"))
    failed = failures + errors
    minutes = f"{float(suite.get('time')) / 60:.1f}"
    return {
        "passed": str(tests - skipped - failed),
        "skipped": str(skipped),
        "failed": str(failed),
        "minutes": minutes,
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


def main(result: str, command: str) -> None:
    row = {"command": f"`{command}`", **surroundings(), **counted(Path(result).read_text(encoding="utf-8"))}
    bundle.write_text(PAGE, with_row(PAGE.read_text(encoding="utf-8"), row))
    print(f"docs/tested-with.md: {row['passed']} passed, {row['skipped']} skipped, {row['failed']} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
