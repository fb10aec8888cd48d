"""Nsight Compute's CSV into the kernels that `ncu.read` gives, without NVIDIA's reader.

Wide, a row a launch: `ncu --import F --page raw --csv --print-units base`; row 1 has the names, row 2 the units.
Long, a row a metric: `ncu --import F --csv`, the details page: labels, fewer metrics, and NVIDIA's rules between them.
"""

import csv
import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import Refused, UsageError
from . import metrics


def read(path: Path) -> list[dict]:
    """Kernels of a CSV, in launch order: [{name, duration_us, metrics: {key: value or None}, rules}], as `ncu.read` gives
    them.

    rules: [{name, message, speedup_pct or None}]; a wide CSV has none. Values are in the schema's units and as exact as they
    were printed (two decimals). UsageError: no such file. Refused: no such CSV, one cut off, or numbers that can be read in
    two ways.
    """
    try:
        header, rows = table(path.read_text(encoding="utf-8-sig", errors="replace"))
        launches = long_launches(header, rows) if "Metric Value" in header else wide_launches(header, rows)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise Refused(f"{path} is no readable CSV of Nsight Compute ({error})") from None
    if not launches:
        raise Refused(f"{path} holds no kernel: nothing was profiled, or the file was cut off")
    mark = decimal_mark(text for launch in launches for text, _ in launch["cells"].values())
    if mark is None:
        raise Refused(f"{path}: its numbers can be read in two ways, 1,234 or 1.234; export it again with LC_ALL=C")
    return [_kernel(launch, mark) for launch in launches]


def table(text: str) -> tuple[list[str], list[list[str]]]:
    """(header, rows below it) of ncu's output; its ==PROF== lines and what was printed before the table are left out.

    ValueError: no header. csv.Error: quotes that do not match, as in a file that was cut off.
    """
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("==")]
    start = next((number for number, line in enumerate(lines) if _fields(line)[:2] == ["ID", "Process ID"]), None)
    if start is None:
        raise ValueError("no line that begins with the columns ID and Process ID")
    header, *rows = csv.reader(lines[start:], strict=True)
    return header, rows


def _fields(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def wide_launches(header: list[str], rows: list[list[str]]) -> list[dict]:
    """[{name, cells: {metric name: (text, unit)}, rules: []}] of the raw page. ValueError: no row of units, a short row."""
    if not rows or len(rows[0]) != len(header) or rows[0][0]:
        raise ValueError("neither a Metric Value column nor a row of units: export with --page raw --csv")
    units, wanted = rows[0], set(metrics.names())
    columns = [(number, name) for number, name in enumerate(header) if name in wanted]
    return [
        {
            "name": row[header.index("Kernel Name")],
            "cells": attributes(row[header.index("CC")] if "CC" in header else "")
            | {name: (row[number], units[number]) for number, name in columns},
            "rules": [],
        }
        for row in records(rows, len(header))
    ]


def long_launches(header: list[str], rows: list[list[str]]) -> list[dict]:
    """[{name, cells: {metric name: (text, unit)}, rules}] of the details page. ValueError: a short row, or no such column.

    Labels repeat between sections, so section and label together give the metric; --print-metric-name name prints the
    metric's own name. Of what comes twice the first with a number counts. The page shows no device attributes: the
    compute capability is that of the column CC.
    """
    if lacking := {"Kernel Name", "Section Name", "Metric Name", "Metric Unit"} - set(header):
        raise ValueError(f"no column {', '.join(sorted(lacking))}")
    wanted = set(metrics.names())
    names = {metric.details: metric.names[0] for metric in metrics.schema() if metric.details}
    launches = {}
    for row in records(rows, header.index("Metric Value") + 1):
        cell = dict(zip(header, row, strict=False))  # a row without a rule ends after the value
        new = {"name": cell["Kernel Name"], "cells": attributes(cell.get("CC", "")), "rules": []}
        launch = launches.setdefault((cell["Process ID"], cell["ID"]), new)
        name = names.get((cell["Section Name"], cell["Metric Name"]), cell["Metric Name"])
        if name in wanted and not re.search(r"\d", launch["cells"].get(name, ("",))[0]):
            launch["cells"][name] = (cell["Metric Value"], cell["Metric Unit"])
        if cell.get("Rule Type", "INF") not in ("", "INF"):  # INF only informs
            launch["rules"].append(cell)
    return list(launches.values())


def records(rows: list[list[str]], columns: int) -> Iterable[list[str]]:
    """The rows that start with the two numbers of a launch, its ID and its process; the program may print others."""
    for row in rows:
        if len(row) > 1 and row[0].isdigit() and row[1].isdigit():
            if len(row) < columns:
                raise ValueError(f"a row of launch {row[0]} is cut off")
            yield row


def attributes(compute_capability: str) -> dict[str, tuple[str, str]]:
    """The cells of the two device attributes that "9.0" in the column CC stands for; {} for anything else."""
    found = re.fullmatch(r"(?P<major>\d+)[.,](?P<minor>\d+)", compute_capability.strip())
    return (
        {f"device__attribute_compute_capability_{part}": (found[part], "") for part in ("major", "minor")}
        if found
        else {}
    )


def _kernel(launch: dict, mark: str) -> dict:
    cells = {name: (number(text, mark), unit) for name, (text, unit) in launch["cells"].items()}
    values = metrics.values(cells)
    rules = [_rule(cell, mark) for cell in launch["rules"]]
    return {"name": launch["name"], "duration_us": values["duration"], "metrics": values, "rules": rules}


def _rule(cell: dict, mark: str) -> dict:
    """A rule's verdict; only a "global" estimate is of the kernel's time, a "local" one is of one unit's use."""
    whole = cell.get("Estimated Speedup Type") == "global"
    speedup = number(cell.get("Estimated Speedup", ""), mark) if whole else None
    return {"name": cell["Rule Name"], "message": cell["Rule Description"], "speedup_pct": speedup}


# --- numbers, which ncu prints in the locale of its user ----------------------------------------------------------


def number(text: str, mark: str) -> float | None:
    """117344.5 of "117,344.5" where the decimal mark is ".", of "117.344,5" where it is ","; 31 of 0x1f and "31 (15; 16)".

    None for what is no number: "", "n/a", "nan", "no data", "(!) nan", text.
    """
    plain = _plain(text)
    if re.fullmatch("0x[0-9a-fA-F]+", plain):
        return float(int(plain, 16))
    group = "." if mark == "," else ","
    plain = re.sub(rf"(?<=\d){re.escape(group)}(?=\d{{3}}(?!\d))", "", plain).replace(mark, ".")
    return float(plain) if re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", plain) else None


def decimal_mark(texts: Iterable[str]) -> str | None:
    """ "." or ",": what stands before the decimals in all of these numbers, which one program printed in one locale.

    None when it cannot be told, "1,234" with no other number, or when they contradict each other.
    """
    votes = {_vote(_plain(text)) for text in texts} - {""}
    certain = votes - {"?"}
    if len(certain) > 1 or (votes and not certain):
        return None
    return certain.pop() if certain else "."


def _plain(text: str) -> str:
    """Without the values of single instances, which follow in brackets, and without blanks and ' between thousands."""
    return re.sub(r"[\s'’]", "", text.partition("(")[0])


def _vote(text: str) -> str:
    """The decimal mark that one number proves; "" when it has neither mark, "?" when it could be both."""
    marks = re.sub(r"[+\-\d]", "", text)
    if not re.fullmatch("[.,]+", marks):
        return ""
    if len(set(marks)) == 2:  # 1,234.5
        return marks[-1]
    if len(marks) > 1:  # 1,234,567
        return "." if marks[0] == "," else ","
    return "?" if re.fullmatch(r"[+-]?[1-9]\d{0,2}[.,]\d{3}", text) else marks
