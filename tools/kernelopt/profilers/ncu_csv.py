"""Nsight Compute's CSV into kernel profiles, without NVIDIA's reader.

Wide, a row a launch: `ncu --import F --page raw --csv --print-units base`; row 1 has the names, row 2 the units.
Long, a row a metric: `ncu --import F --csv`, the details page: labels, fewer metrics, and NVIDIA's rules between them.
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import Refused, UsageError
from . import metrics
from .profile import KernelProfile, NvidiaRule

Cell = tuple[str, str]  # (text, unit) as ncu printed them


@dataclass
class CsvLaunch:
    """One launch before its numbers are read. cells: by the metric's name. rules: their rows, by column."""

    name: str
    cells: dict[str, Cell]
    rules: list[dict[str, str]] = field(default_factory=list)


def read(path: Path) -> tuple[KernelProfile, ...]:
    """The kernels of a CSV in launch order, as `ncu.read` returns them; a wide CSV has no rules.

    Metrics are in the schema's units, as exact as they were printed (two decimals). UsageError: the file cannot be
    read. Refused: another CSV, one that was cut off, or numbers that can be read in two ways.
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
    mark = decimal_mark(text for launch in launches for text, _ in launch.cells.values())
    if mark is None:
        raise Refused(f"{path}: its numbers can be read in two ways, 1,234 or 1.234; export it again with LC_ALL=C")
    return tuple(_kernel(launch, mark) for launch in launches)


def table(text: str) -> tuple[list[str], list[list[str]]]:
    """(header, rows below it) of ncu's output, without its ==PROF== lines and without the lines before the table.

    ValueError: no header. csv.Error: unbalanced quotes, as in a file that was cut off.
    """
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("==")]
    start = next((number for number, line in enumerate(lines) if _fields(line)[:2] == ["ID", "Process ID"]), None)
    if start is None:
        raise ValueError("no line that begins with the columns ID and Process ID")
    header, *rows = csv.reader(lines[start:], strict=True)
    return header, rows


def _fields(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def wide_launches(header: list[str], rows: list[list[str]]) -> list[CsvLaunch]:
    """The launches of the raw page. ValueError: no row of units, or a short row."""
    if not rows or len(rows[0]) != len(header) or rows[0][0]:
        raise ValueError("neither a Metric Value column nor a row of units: export with --page raw --csv")
    units, wanted = rows[0], set(metrics.names())
    columns = [(number, name) for number, name in enumerate(header) if name in wanted]
    return [
        CsvLaunch(
            row[header.index("Kernel Name")],
            attributes(row[header.index("CC")] if "CC" in header else "")
            | {name: (row[number], units[number]) for number, name in columns},
        )
        for row in records(rows, len(header))
    ]


def long_launches(header: list[str], rows: list[list[str]]) -> list[CsvLaunch]:
    """The launches of the details page. ValueError: a short row, or a missing column.

    Labels repeat between sections, so section and label together identify the metric; with --print-metric-name name
    ncu prints the metric's own name. Where a metric comes twice, the first number counts. The page shows no device
    attributes: the compute capability is that of the column CC.
    """
    if lacking := {"Kernel Name", "Section Name", "Metric Name", "Metric Unit"} - set(header):
        raise ValueError(f"no column {', '.join(sorted(lacking))}")
    wanted = set(metrics.names())
    names = {metric.details: metric.names[0] for metric in metrics.schema() if metric.details}
    launches = {}
    for row in records(rows, header.index("Metric Value") + 1):
        cell = dict(zip(header, row, strict=False))  # a row without a rule ends after the value
        new = CsvLaunch(cell["Kernel Name"], attributes(cell.get("CC", "")))
        launch = launches.setdefault((cell["Process ID"], cell["ID"]), new)
        name = names.get((cell["Section Name"], cell["Metric Name"]), cell["Metric Name"])
        if name in wanted and not re.search(r"\d", launch.cells.get(name, ("",))[0]):
            launch.cells[name] = (cell["Metric Value"], cell["Metric Unit"])
        if cell.get("Rule Type", "INF") not in ("", "INF"):  # INF only informs
            launch.rules.append(cell)
    return list(launches.values())


def records(rows: list[list[str]], columns: int) -> Iterable[list[str]]:
    """The rows of launches. Each starts with two numbers: its ID and its process. The program may print other rows."""
    for row in rows:
        if len(row) > 1 and row[0].isdigit() and row[1].isdigit():
            if len(row) < columns:
                raise ValueError(f"a row of launch {row[0]} is cut off")
            yield row


def attributes(compute_capability: str) -> dict[str, Cell]:
    """The cells of the two device attributes that "9.0" in the column CC stands for; {} for anything else."""
    match = re.fullmatch(r"(?P<major>\d+)[.,](?P<minor>\d+)", compute_capability.strip())
    if match is None:
        return {}
    return {f"device__attribute_compute_capability_{part}": (match[part], "") for part in ("major", "minor")}


def _kernel(launch: CsvLaunch, mark: str) -> KernelProfile:
    cells = {name: (parse_number(text, mark), unit) for name, (text, unit) in launch.cells.items()}
    values = metrics.values(cells)
    rules = tuple(_rule(cell, mark) for cell in launch.rules)
    return KernelProfile(launch.name, values["duration"], values, rules)


def _rule(cell: dict[str, str], mark: str) -> NvidiaRule:
    """A "global" estimate is for the kernel's time. A "local" one is for a unit of the GPU and does not count."""
    whole = cell.get("Estimated Speedup Type") == "global"
    speedup = parse_number(cell.get("Estimated Speedup", ""), mark) if whole else None
    return NvidiaRule(cell["Rule Name"], cell["Rule Description"], speedup)


# --- numbers, which ncu prints in the locale of its user ----------------------------------------------------------


def parse_number(text: str, mark: str) -> float | None:
    """117344.5 of "117,344.5" where the decimal mark is ".", of "117.344,5" where it is ","; 31 of 0x1f and "31 (15;
    16)".

    None for anything else: "", "n/a", "nan", "no data", "(!) nan", text.
    """
    plain = _plain(text)
    if re.fullmatch("0x[0-9a-fA-F]+", plain):
        return float(int(plain, 16))
    group = "." if mark == "," else ","
    plain = re.sub(rf"(?<=\d){re.escape(group)}(?=\d{{3}}(?!\d))", "", plain).replace(mark, ".")
    return float(plain) if re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", plain) else None


def decimal_mark(texts: Iterable[str]) -> str | None:
    """ "." or ",": the decimal mark of these numbers, which one program printed in one locale.

    None when it is ambiguous ("1,234" and no other number), or when the numbers contradict each other.
    """
    votes = {_vote(_plain(text)) for text in texts} - {""}
    certain = votes - {"?"}
    if len(certain) > 1 or (votes and not certain):
        return None
    return certain.pop() if certain else "."


def _plain(text: str) -> str:
    """The number without blanks, without ' in thousands, and without the values of single instances in brackets."""
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
