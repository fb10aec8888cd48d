"""Nsight Systems: collect a report of the marked calls, and read the tables that `nsys stats` prints.

The command lines follow NVIDIA's documentation. The readers are tested on tables with the documented columns. The
collection never ran, because no machine had a complete nsys. torch_trace.py takes the timeline when nsys is absent or
writes no report.
"""

import csv
import io
import re
import shutil
import subprocess
from pathlib import Path

from ..device import outcomes, programs
from ..device.sandbox import Sandbox
from ..errors import Refused, TimedOut
from .timeline import HostEvent, Launch, Trace

SOURCE = "nsys"
CALLS = 20
TABLES = ("cuda_gpu_trace", "cuda_api_trace")


def program() -> str | None:
    """The path of nsys, if there is one."""
    return programs.find("nsys")


def command(report: Path) -> list[str]:
    """The nsys command line, before the worker's. It records the time between the worker's marks."""
    return [
        *(program() or "nsys", "profile", "--trace", "cuda,nvtx", "--sample", "none", "--cpuctxsw", "none"),
        *("--capture-range", "cudaProfilerApi", "--capture-range-end", "stop", "--cuda-graph-trace", "node"),
        *("--force-overwrite", "true", "--output", str(report.with_suffix("")), "--"),
    ]


def collect(sandbox: Sandbox, kernel: Path, inputs: str, report: Path, timeout_s: float) -> bool:
    """Some calls of `kernel` into a report; False when nsys wrote none. Refused: the kernel failed. TimedOut."""
    arguments = {"kernel": str(kernel.resolve()), "inputs": inputs, "calls": CALLS}
    with sandbox.folder("nsys") as folder:
        made = Path(folder, "report.nsys-rep")
        outcome = sandbox.run_under(command(made), "profile", arguments, timeout_s)
        if outcome.timed_out:
            raise TimedOut(f"nsys did not finish in {timeout_s:.0f} s; --timeout raises the limit")
        if outcome.result is not None and (failed := outcomes.failure(outcome)):
            raise Refused(f"the kernel failed under nsys: {failed.message.strip()}")
        if made.exists():
            shutil.copyfile(made, report)
    return report.exists()


def read(report: Path) -> Trace | None:
    """The trace of a report; None when nsys cannot export its tables."""
    tables = {}
    for table in TABLES:
        arguments = ["stats", "--report", table, "--format", "csv", "--force-export=true", "--output", "-", str(report)]
        done = subprocess.run([program() or "nsys", *arguments], capture_output=True, text=True)
        if done.returncode:
            return None
        tables[table] = done.stdout
    return trace(tables["cuda_gpu_trace"], tables["cuda_api_trace"])


def trace(gpu_trace: str, api_trace: str) -> Trace:
    """The trace from the text of the two tables. Refused when it holds no kernel."""
    launches = tuple(_launch(row) for row in rows(gpu_trace))
    if not launches:
        raise Refused("the report of nsys holds no kernel: does the call launch one?")
    api = tuple(HostEvent(row["Name"], us(row, "Start"), us(row, "Duration")) for row in rows(api_trace))
    return Trace(SOURCE, launches, api)


def rows(text: str) -> list[dict[str, str]]:
    """The rows of a table by the names of its columns; lines before the header are skipped."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("Start (")), len(lines))
    return list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))


def us(row: dict[str, str], column: str) -> float:
    """Microseconds in a column whose header names the unit: "Duration (ns)"."""
    header = next(name for name in row if re.match(rf"{column} \((ns|us|ms|s)\)", name))
    factor = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}[header.partition("(")[2].rstrip(")")]
    return float(row[header].replace(",", "")) * factor


def _launch(row: dict[str, str]) -> Launch:
    return Launch(
        name=row["Name"],
        start_us=us(row, "Start"),
        us=us(row, "Duration"),
        stream=row.get("Strm") or None,
        grid=_triple(row, "Grd"),
        block=_triple(row, "Blk"),
        registers=_whole(row.get("Reg/Trd")),
        shared_bytes=None,  # nsys prints it rounded, in megabytes
    )


def _triple(row: dict[str, str], name: str) -> list[int] | None:
    sizes = [_whole(row.get(f"{name}{axis}")) for axis in "XYZ"]
    return None if None in sizes else sizes


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdigit() else None
