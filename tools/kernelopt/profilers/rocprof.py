"""AMD's rocprofv3: its CSV files and rocpd databases into kernels, and what limits a kernel.

Parser tested on samples, not run on AMD hardware.
"""

import csv
import math
import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from ..errors import Refused, UsageError
from . import metrics

ORIGIN = "rocprofv3 output, recorded elsewhere; parser tested on samples, not run on AMD hardware"

QUERIES = (  # a rocpd database, asked for the rows that the CSV files hold: the kernel trace, then the counters
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
LIMITERS = {  # measure -> (threshold from which it limits, name, class)
    "memory": ("amd_dram_pct", "dram", "memory"),
    "mfma_busy": ("amd_mfma_pct", "matrix cores", "compute"),
    "valu_busy": ("amd_valu_pct", "vector units", "compute"),
}


# --- reading ------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict:
    """The profile of a program from a CSV file, a rocpd database (.db) or the folder of one or more runs of it.

    {kernels: [{name, duration_us, metrics: {key: value or None}}] in order of dispatch, invalid: [{kernel, dispatch,
    counters, reason}], work: None, params: None, origin}. Counters of several runs meet by dispatch and kernel; a folder's
    databases are read where it has no CSV of kernels. UsageError: nothing there. Refused: not rocprofv3's, or of several
    processes at once.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    runs = _runs([path] if path.is_file() else sorted(path.rglob("*.csv"))) or _runs(sorted(path.rglob("*.db")))
    if not runs:
        raise Refused(f"{path} holds no kernel: neither a kernel trace nor counters of rocprofv3")
    sets = [frozenset(run["counters"]) for run in runs]
    if len(set(sets)) < len(sets):
        raise Refused(f"{path} holds two runs with the same counters: name the output of one process")
    kernels, invalid = merge(runs)
    return {"kernels": kernels, "invalid": invalid, "work": None, "params": None, "origin": ORIGIN}


def _runs(files: list[Path]) -> list[dict]:
    """The runs (`parse`) that launched a kernel."""
    rows = {}
    for file in files:
        # One run writes its trace and its counters into files that differ in this part of their names.
        run = re.sub(r"_?(kernel_trace|counter_collection(_trace)?)$", "", str(file.with_suffix("")))
        rows.setdefault(run, []).extend(_database_rows(file) if file.suffix == ".db" else _csv_rows(file))
    return [parse(rows[run], run) for run in rows if rows[run]]


def _csv_rows(path: Path) -> list[dict]:
    """Rows of a CSV by header, its names in small letters (releases differ in them); [] of one without kernels."""
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
        raise Refused(f"{path} was cut off, or is no CSV of rocprofv3: a row has not the columns of the header")
    return [dict(zip(names, row, strict=True)) for row in rows if row]


def _database_rows(path: Path) -> list[dict]:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for query in QUERIES for row in database.execute(query)]
    except sqlite3.Error as error:
        raise Refused(
            f"{path} is no rocpd database that is known here ({error}); "
            f"try: rocpd convert -i {path} --output-format csv, and the folder it writes"
        ) from None


def parse(rows: Iterable[dict], source: str) -> dict:
    """{counters: all names, dispatches: {(id, kernel): {duration_us, columns, counters: {name: value or None}}}} of one run.

    rows: of a trace, one a dispatch; of counters, one a dispatch and counter; or both. Refused: one comes twice, as in the
    output of two processes, or has no number.
    """
    dispatches, seen = {}, set()
    for row in rows:
        if not str(row["dispatch_id"]).isdigit():
            raise Refused(f"{source}: {row['dispatch_id']!r} is no number of a dispatch")
        key, counter = (int(row["dispatch_id"]), row["kernel_name"]), row.get("counter_name")
        if (key, counter) in seen:
            raise Refused(f"{source}: dispatch {key[0]} comes twice; name the output of one process")
        seen.add((key, counter))
        one = dispatches.setdefault(key, {"duration_us": None, "columns": {}, "counters": {}})
        one["duration_us"] = one["duration_us"] or _duration(row)
        one["columns"].update({name: number(row[column]) for column, name in COLUMNS.items() if column in row})
        if counter:
            one["counters"][counter] = number(row.get("counter_value"))
    return {"counters": {counter for _, counter in seen if counter}, "dispatches": dispatches}


def _duration(row: dict) -> float | None:
    times = [str(row.get(f"{which}_timestamp")) for which in ("start", "end")]
    nanoseconds = int(times[1]) - int(times[0]) if all(time.isdigit() for time in times) else 0
    return nanoseconds / 1e3 if nanoseconds > 0 else None


def number(value: object) -> float | None:
    """The finite number of a cell; None for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def merge(runs: list[dict]) -> tuple[list[dict], list[dict]]:
    """(kernels, what is not believed) of several runs; the time is that of a run without counters where there is one."""
    together, invalid = {}, []
    for run in sorted(runs, key=lambda run: bool(run["counters"])):
        for key, one in run["dispatches"].items():
            counted = known(one["counters"])
            if counted and not any(counted.values()):
                invalid.append(_doubt(key, sorted(counted), "all zero: the counters were not read"))
                counted = {}
            launch = known({"duration_us": one["duration_us"], **one["columns"]})
            together[key] = {**launch, **counted, **together.get(key, {})}  # what came first stays
    kernels = []
    for key, found in sorted(together.items()):
        values, doubts = metric_values(found)
        invalid += [_doubt(key, *doubt) for doubt in doubts]
        kernels.append({"name": key[1], "duration_us": values["duration"], "metrics": values})
    return kernels, invalid


def known(values: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _doubt(key: tuple[int, str], counters: list[str], reason: str) -> dict:
    return {"kernel": key[1], "dispatch": key[0], "counters": counters, "reason": reason}


def metric_values(found: dict[str, float | None]) -> tuple[dict[str, float | None], list[tuple[list[str], str]]]:
    """({key: value or None} of the schema, [(counters, why they are not believed)]) of one dispatch's counters."""
    values, doubts = {}, []
    for row in metrics.rocprof()["metrics"]:
        value = _metric_value(row, found)
        if row["unit"] == "%" and value is not None and value > 100:
            doubts.append((row["counters"], f"{value:.1f} %: above 100 % it is an artefact of how it is normalised"))
            value = None
        values[row["key"]] = value
    return values, doubts


def _metric_value(row: dict, found: dict) -> float | None:
    parts, whole = ([found.get(name) for name in row.get(field, ())] for field in ("counters", "of"))
    if None in parts + whole or (whole and not sum(whole)):
        return None
    return row.get("factor", 1) * sum(parts) / (sum(whole) if whole else 1)


# --- what limits a kernel -----------------------------------------------------------------------------------------


def classify(m: dict, limits: dict, bandwidth_gbps: float | None = None) -> dict:
    """{class, limiter, reasons} of one kernel, as `diagnosis.classify` gives them.

    bandwidth_gbps: the product's documented memory bandwidth in GB/s; without it memory cannot be ruled out as the
    limiter. A unit that was not measured is never taken for idle.
    """
    shares = {"memory": memory_share(m, bandwidth_gbps), **{key: m.get(key) for key in ("mfma_busy", "valu_busy")}}
    reasons = [f"{LIMITERS[unit][1]} {share:.1f} %" for unit, share in shares.items() if share is not None]
    if shares["memory"] is not None and shares["memory"] > 100:
        reasons[0] += " of the bandwidth, which is not believed: the Infinity Cache served a part"
        shares["memory"] = None
    absent = [LIMITERS[unit][1] for unit, share in shares.items() if share is None]
    if absent:
        reasons.append(f"not known: {', '.join(absent)}")
    busy = [unit for unit, share in shares.items() if share is not None and share >= limits[LIMITERS[unit][0]]]
    if busy:
        _, limiter, class_ = LIMITERS[max(busy, key=lambda unit: shares[unit])]
        return {"class": class_, "limiter": limiter, "reasons": reasons}
    if absent:
        return {"class": "unknown", "limiter": None, "reasons": reasons}
    occupancy = m.get("achieved_occupancy")
    reasons.append("occupancy was not collected" if occupancy is None else f"occupancy {occupancy:.1f} %")
    low = occupancy is not None and occupancy < limits["amd_low_occupancy_pct"]
    return {"class": "underutilized" if low else "latency", "limiter": None, "reasons": reasons}


def memory_share(m: dict, bandwidth_gbps: float | None) -> float | None:
    """Bytes past the L2 in the kernel's time, in percent of the bandwidth; None where one of them is not known."""
    moved = [m.get(key) for key in ("memory_bytes_read", "memory_bytes_written")]
    if None in moved or not m.get("duration") or not bandwidth_gbps:
        return None
    return 100 * sum(moved) / (m["duration"] * 1e3 * bandwidth_gbps)
