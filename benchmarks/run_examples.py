#!/usr/bin/env python3
"""Every worked example against what a user would run instead: PyTorch, torch.compile, and its opponents/ or those of
the hard deck.

On a machine with an NVIDIA GPU: python benchmarks/run_examples.py [NAME ...] [--json FILE]. Each kernel is verified,
then timed in turn with each opponent in three processes. Prints a Markdown table, with floors of this card; --json
writes what it rests on, after each opponent.
`--table FILE` prints it again from such a file. exit 1 when a kernel is wrong."""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from kernelopt import cli
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import ToolError
from kernelopt.hardware import roofline, wiki
from kernelopt.hardware.work import Work
from kernelopt.measure import baselines, card_rates, pairing, timing, verify
from kernelopt.session import platforms
from kernelopt.session.record_store import RecordStore
from kernelopt.session.subject import of_workspace
from kernelopt.session.workspace import Workspace

EXAMPLES = ROOT / "examples"
HARD_DECK = ROOT / "benchmarks" / "hard_deck"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="which examples (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
    modes = [*baselines.MODES]
    parser.add_argument("--modes", nargs="*", default=modes, choices=modes, help="of PyTorch (default: all)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where compiled kernels stay (default: nowhere)")
    parser.add_argument("--quick", action="store_true", help="verify on the task's own inputs and two seeds alone")
    parser.add_argument("--no-mix", action="store_true", help="leave out the rates of kernels that only move bytes")
    parser.add_argument("--opponent-seconds", type=float, default=600, help="limit of each opponent (%(default)s)")
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="FILE", help="measure nothing, print these measurements"
    )
    args = parser.parse_args()
    rows = []
    if args.table:
        rows = [row for file in args.table for row in json.loads(file.read_text())]
    for name in [] if args.table else args.name or sorted(path.parent.name for path in EXAMPLES.glob("*/git-log.txt")):
        for of_example in measured(name, args):
            if args.json:
                args.json.write_text(json.dumps([*rows, *of_example], indent=1) + "\n")
        rows += of_example
    print(table(rows))
    return int(any(row["status"] != "OK" for row in rows))


def measured(name: str, args: argparse.Namespace) -> Iterator[list[dict]]:
    """One example, after each opponent, a row a workload: {name, status, shapes, ours_us, the fields of
    roofline.Utilization, against: {opponent: {verdict, speedup, us}}, latency_us by do_bench, gpu_state, rounds,
    minutes; memory-bound: ceiling}.

    name: "gemm", or "gemm/tall" for a workload that is not the default. minutes: from the first verdict to the last,
    profiles included, exploration not. ceiling: GB/s of a kernel that only moves as many bytes in and out.
    """
    print(f"{name} …", file=sys.stderr, flush=True)
    workspace = Workspace(EXAMPLES / name)
    task = workspace.task()
    target = of_workspace(workspace, task)
    records = RecordStore(workspace).records(masked=True)
    with Sandbox("cuda", args.cache) as sandbox:
        checked = replace(target, only_these_shapes=args.quick or target.only_these_shapes)
        verdict = verify.verify(sandbox, checked, seeds=2 if args.quick else 3)
        about = {"status": verdict.status, "summary": verdict.summary, "device": sandbox.device_name}
        about |= {"dtype": task.dtype, "rounds": len(records) - 1}
        about |= {"minutes": minutes(records[0].timestamp, records[-1].timestamp)}
        rows = {
            workload: {"name": name if workload == "default" else f"{name}/{workload}", "shapes": shapes, **about}
            for workload, shapes in task.shapes.items()
        }
        if verdict.status != "OK":
            yield [rows["default"]]
            return
        page = platforms.of_device(sandbox.device_name, workspace, task)  # of this card, not of the session's
        cases = timing.inputs(sandbox, target.reference, task.dtype, list(rows), 600)
        for opponent, path in files(workspace, args.modes, sandbox.scratch).items():
            time_against(sandbox, target.kernel, opponent, path, cases, rows, args.opponent_seconds)
            for workload, row in rows.items():
                add_rates(row, page, task.work[workload])
            yield list(rows.values())
    if not args.no_mix:
        for workload, row in rows.items():
            add_mix(row, task.work[workload])
        yield list(rows.values())


def time_against(
    sandbox: Sandbox, kernel: Path, opponent: str, path: Path, cases: dict, rows: dict[str, dict], limit_s: float
) -> None:
    """Adds to the row of each workload what came of timing the kernel in turn with an opponent."""
    try:
        timed = timing.measure(sandbox, kernel, path, cases, timeout_s=limit_s)
    except ToolError as error:
        for row in rows.values():
            row.setdefault("against", {})[opponent] = {"error": str(error)}
        return
    for workload, row in rows.items():
        of_workload = timed[workload]
        row |= {key: of_workload.timing.to_json()[key] for key in ("latency_us", "gpu_us", "gpu_state")}
        theirs = statistics.median(time for run in of_workload.runs for pair in run.b_us for time in pair)
        compared = {**pairing.compare(of_workload.runs).to_json(), "us": theirs}
        row.setdefault("against", {})[opponent] = compared


def add_rates(row: dict, page: wiki.Page, work: Work) -> None:
    """Adds our time, the rates at it and the floor, once an opponent ran."""
    if ran := [result for result in row["against"].values() if "us" in result]:
        row["ours_us"] = ours_us(ran[0])
        roof = roofline.roof_for(page, work)
        row |= roofline.utilization(row["ours_us"], work.flops, work.bytes_min, roof).to_json()


def add_mix(row: dict, work: Work) -> None:
    """Where memory bounds, adds the rate of a kernel that only moves as many bytes in and out."""
    if row.get("bound") == "memory":
        mix = {"bytes_in": work.bytes_in, "bytes_out": work.bytes_out, "dtype": work.dtype}
        _, ceiling = card_rates.run("ceiling", {**mix, "rep_ms": 100}, 300)
        row["ceiling"] = ceiling.best.to_json()


def ours_us(first: dict) -> float:
    """Our time in the pairs with PyTorch, or with the first opponent that ran: its median over the ratio. do_bench,
    which calls one kernel only, heats the card more or less than two in turn do, so its median fits no ratio."""
    return first["us"] / first["speedup"]["point"]


def minutes(first: str, last: str) -> float:
    """Between two timestamps of records."""
    times = [datetime.datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (first, last)]
    return round((times[1] - times[0]).total_seconds() / 60, 1)


def files(workspace: Workspace, modes: list[str], scratch: Path) -> dict[str, Path]:
    """{opponent: its file}"""
    opponents = {}
    for number, name in enumerate(modes):
        opponents[name] = scratch / f"opponent_{number}.py"
        opponents[name].write_bytes(baselines.source(workspace.reference.read_bytes(), name))
    folders = (workspace.root, HARD_DECK / workspace.root.name)
    own = sorted(path for folder in folders for path in (folder / "opponents").glob("*.py"))
    return opponents | {path.stem.replace("_", " "): path for path in own}


def table(rows: list[dict]) -> str:
    """Markdown; times in microseconds, ratios are their time over ours, measured in turn."""
    names = list(baselines.MODES)
    titles = [
        "problem",
        "shapes",
        "ours (us)",
        "alone (us)",
        "share of the floor",
        "rate",
        "share of its mix",
        *names,
        "others",
        "rounds",
        "minutes",
    ]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [
            row["name"],
            row["shapes"],
            *(measured_cells(row, names) if "ours_us" in row else [row["summary"]]),
        ]
        lines.append("| " + " | ".join(cells) + " |" + " |" * (len(titles) - len(cells)))
    return "\n".join(lines)


def measured_cells(row: dict, names: list[str]) -> list[str]:
    others = [f"{name}: {cell(result)}" for name, result in row["against"].items() if name not in names]
    rate, share = f"{row['tflops']:.0f} TFLOPS", "–"
    if row["bound"] == "memory":
        reached = row["bandwidth_gbps"]
        rate = f"{reached:.0f} GB/s"
        if ceiling := row.get("ceiling"):
            share = f"{100 * reached / ceiling['median']:.1f} % of {ceiling['median']:.0f} GB/s"
    return [
        f"{row['ours_us']:.1f}",
        f"{row['latency_us']['median']:.1f}",
        f"{row['floor_share_pct']:.1f} % of {row['floor_us']:.1f} us",
        rate,
        share,
        *(cell(row["against"][name]) if name in row["against"] else "–" for name in names),
        "; ".join(others) or "–",
        str(row["rounds"]),
        f"{row['minutes']:.0f}",
    ]


def cell(result: dict) -> str:
    """ "1150.2 us, 1.15x (1.14 to 1.16)" """
    if "error" in result:
        return f"not run: {result['error']}"
    low, high = result["speedup"]["ci95"]
    return f"{result['us']:.1f} us, {result['speedup']['point']:.3f}x ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    cli.run(main)
