"""AMD's rocprofv3: its CSV files and rocpd databases into a profile.

The parser was tested on samples. It never ran on AMD hardware.
"""

import csv
import math
import re
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import Refused, UsageError
from . import metrics
from .profile import Doubt, KernelProfile, Metrics, Profile

ORIGIN = "rocprofv3 output, recorded elsewhere; parser tested on samples, not run on AMD hardware"

QUERIES = (  # of a rocpd database, for the rows that the CSV files hold: the kernel trace, then the counters
    'SELECT dispatch_id, name AS kernel_name, start AS start_timestamp, "end" AS end_timestamp, '
    "lds_size AS lds_block_size, scratch_size FROM kernels",
    'SELECT dispatch_id, kernel_name, start AS start_timestamp, "end" AS end_timestamp, counter_name, '
    "value AS counter_value, vgpr_count, accum_vgpr_count, sgpr_count, lds_block_size, scratch_size "
    "FROM counters_collection",
)
COLUMNS = {  # name in the output, in small letters -> name in the schema
    "vgpr_count": "vgpr_count",
    "accum_vgpr_count": "accum_vgpr_count",
    "sgpr_count": "sgpr_count",
    "lds_block_size": "lds_block_size",
    "group_segment_size": "lds_block_size",
    "scratch_size": "scratch_size",
    "private_segment_size": "scratch_size",
}

Row = Mapping[str, object]  # column, in small letters -> cell; releases of rocprofv3 differ in their columns

# --- reading ------------------------------------------------------------------------------------------------------


@dataclass
class Dispatch:
    """One launch in one run. columns: resources of the launch, by name in the schema."""

    duration_us: float | None = None
    columns: dict[str, float | None] = field(default_factory=dict)
    counters: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One run of the program. counters: names of all that it read. dispatches: by (dispatch id, kernel)."""

    counters: frozenset[str]
    dispatches: dict[tuple[int, str], Dispatch]


def is_output(path: Path) -> bool:
    """Is this output of rocprofv3: a rocpd database, or a CSV that names the dispatch of each kernel?"""
    if path.is_dir():
        ours = any(path.glob("*.ncu-rep")) or (path / "metrics.json").exists()
        return not ours and any(map(is_output, (*path.rglob("*.db"), *path.rglob("*.csv"))))
    if path.suffix == ".db":
        return path.is_file()
    if path.suffix != ".csv" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return "dispatch_id" in file.readline().lower()


def read(path: Path) -> Profile:
    """The profile of a program from a CSV file, a rocpd database (.db) or the folder of one or more runs.

    Kernels are in the order of dispatch. Counters of several runs are joined by dispatch and kernel. Databases of a
    folder are read where it has no CSV of kernels. UsageError: the path does not exist. Refused: another program wrote
    it, or it mixes the output of several processes.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    runs = _runs([path] if path.is_file() else sorted(path.rglob("*.csv"))) or _runs(sorted(path.rglob("*.db")))
    if not runs:
        raise Refused(f"{path} holds no kernel: neither a kernel trace nor counters of rocprofv3")
    if len({run.counters for run in runs}) < len(runs):
        raise Refused(f"{path} holds two runs with the same counters: name the output of one process")
    kernels, doubts = merge(runs)
    return Profile(kernels, is_amd=True, doubts=doubts)


def _runs(files: list[Path]) -> list[Run]:
    """The runs that launched a kernel."""
    rows: dict[str, list[Row]] = {}
    for file in files:
        # One run writes its trace and its counters into files that differ in this part of their names.
        run = re.sub(r"_?(kernel_trace|counter_collection(_trace)?)$", "", str(file.with_suffix("")))
        rows.setdefault(run, []).extend(_database_rows(file) if file.suffix == ".db" else _csv_rows(file))
    return [parse(rows[run], run) for run in rows if rows[run]]


def _csv_rows(path: Path) -> list[Row]:
    """The rows of a CSV; [] when it has no kernels."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except csv.Error as error:
        raise Refused(f"{path} is no readable CSV ({error})") from None
    names = [name.lower() for name in header]
    if not {"dispatch_id", "kernel_name"} <= set(names):
        return []
    if any(row and len(row) != len(names) for row in rows):
        raise Refused(f"{path} was cut off, or is no CSV of rocprofv3: a row lacks columns of the header")
    return [dict(zip(names, row, strict=True)) for row in rows if row]


def _database_rows(path: Path) -> list[Row]:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for query in QUERIES for row in database.execute(query)]
    except sqlite3.Error as error:
        raise Refused(
            f"{path} is not a rocpd database of a known layout ({error}); "
            f"try: rocpd convert -i {path} --output-format csv, and the folder it writes"
        ) from None


def parse(rows: Iterable[Row], source: str) -> Run:
    """One run. rows: one a dispatch (of a trace), one a dispatch and counter (of counters), or both.

    Refused: a row comes twice, as in the output of two processes, or a dispatch has no number.
    """
    dispatches: dict[tuple[int, str], Dispatch] = {}
    seen = set()
    for row in rows:
        if not str(row["dispatch_id"]).isdigit():
            raise Refused(f"{source}: {row['dispatch_id']!r} is not the number of a dispatch")
        key, counter = (int(row["dispatch_id"]), row["kernel_name"]), row.get("counter_name")
        if (key, counter) in seen:
            raise Refused(f"{source}: dispatch {key[0]} comes twice; name the output of one process")
        seen.add((key, counter))
        dispatch = dispatches.setdefault(key, Dispatch())
        dispatch.duration_us = dispatch.duration_us or _duration(row)
        dispatch.columns.update({name: _finite(row[column]) for column, name in COLUMNS.items() if column in row})
        if counter:
            dispatch.counters[counter] = _finite(row.get("counter_value"))
    return Run(frozenset(counter for _, counter in seen if counter), dispatches)


def _duration(row: Row) -> float | None:
    times = [str(row.get(f"{end}_timestamp")) for end in ("start", "end")]
    nanoseconds = int(times[1]) - int(times[0]) if all(time.isdigit() for time in times) else 0
    return nanoseconds / 1e3 if nanoseconds > 0 else None


def _finite(value: object) -> float | None:
    """The finite number of a cell; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def merge(runs: list[Run]) -> tuple[tuple[KernelProfile, ...], tuple[Doubt, ...]]:
    """(kernels, doubts) of several runs. A run without counters gives the time, where there is one."""
    together: dict[tuple[int, str], dict[str, float]] = {}
    doubts = []
    for run in sorted(runs, key=lambda run: bool(run.counters)):
        for key, dispatch in run.dispatches.items():
            counted = known(dispatch.counters)
            if counted and not any(counted.values()):
                doubts.append(_doubt(key, tuple(sorted(counted)), "all zero: the counters were not read"))
                counted = {}
            launch = known({"duration_us": dispatch.duration_us, **dispatch.columns})
            together[key] = {**launch, **counted, **together.get(key, {})}  # the first value stays
    kernels = []
    for key, counters in sorted(together.items()):
        values, artefacts = metric_values(counters)
        doubts += [_doubt(key, names, reason) for names, reason in artefacts]
        kernels.append(KernelProfile(key[1], values["duration"], values))
    return tuple(kernels), tuple(doubts)


def known(values: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _doubt(key: tuple[int, str], counters: tuple[str, ...], reason: str) -> Doubt:
    dispatch, kernel = key
    return Doubt(kernel, dispatch, counters, reason)


def metric_values(counters: dict[str, float]) -> tuple[Metrics, list[tuple[tuple[str, ...], str]]]:
    """(the metrics of one dispatch, [(counters, why they are not believed)])"""
    values, doubts = {}, []
    for metric in metrics.rocprof():
        value = _metric_value(metric, counters)
        if metric.unit == "%" and value is not None and value > 100:
            doubts.append((metric.counters, f"{value:.1f} %: above 100 % it is an artefact of how it is normalised"))
            value = None
        values[metric.key] = value
    return values, doubts


def _metric_value(metric: metrics.RocprofMetric, counters: dict[str, float]) -> float | None:
    parts, whole = ([counters.get(name) for name in group] for group in (metric.counters, metric.of))
    if None in parts + whole or (whole and not sum(whole)):
        return None
    return metric.factor * sum(parts) / (sum(whole) if whole else 1)
