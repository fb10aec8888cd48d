#!/usr/bin/env python3
"""Every worked example against what a user would run instead: PyTorch, torch.compile, and the files in opponents/.

On an H200: python benchmarks/run_examples.py [NAME ...] [--json FILE]. Each kernel is verified, then timed in turn with
each opponent in three processes. Prints a Markdown table; with --json writes what it rests on. `--table FILE` prints it
again from such a file. exit 1 when a kernel is wrong."""

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from kernelopt import cli
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import ToolError
from kernelopt.hardware import roofline
from kernelopt.measure import baselines, card_rates, pairing, timing, verify
from kernelopt.session import platforms
from kernelopt.session.record_store import RecordStore
from kernelopt.session.target import of_workspace
from kernelopt.session.workspace import Workspace

EXAMPLES = ROOT / "examples"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="which examples (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="FILE", help="measure nothing, print these measurements"
    )
    args = parser.parse_args()
    if args.table:
        rows = [row for file in args.table for row in json.loads(file.read_text())]
    else:
        names = args.name or sorted(path.parent.name for path in EXAMPLES.glob("*/git-log.txt"))
        rows = [measured(name) for name in names]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return int(any(row["status"] != "OK" for row in rows))


def measured(name: str) -> dict:
    """One example: {name, status, shapes, ours_us, the fields of roofline.Utilization, against: {opponent: {verdict,
    speedup, us}}, latency_us by do_bench, gpu_state, rounds, minutes; memory-bound: ceiling}.

    minutes: from the first verdict to the last, profiles included, exploration not. ceiling: GB/s of a kernel that only
    moves as many bytes in and out.
    """
    print(f"{name} …", file=sys.stderr, flush=True)
    workspace = Workspace(EXAMPLES / name)
    task = workspace.task()
    target = of_workspace(workspace, task)
    with Sandbox("cuda") as sandbox:
        verdict = verify.verify(sandbox, target)
        row = {"name": name, "status": verdict.status, "summary": verdict.summary, "device": sandbox.device_name}
        row |= {"shapes": task.shapes["default"], "dtype": task.dtype, "against": {}}
        records = RecordStore(workspace).records(masked=True)
        row |= {"rounds": len(records) - 1, "minutes": minutes(records[0].timestamp, records[-1].timestamp)}
        if verdict.status != "OK":
            return row
        cases = timing.inputs(sandbox, target.reference, task.dtype, ["default"], 600)
        for opponent, path in files(workspace, sandbox.scratch).items():
            try:
                timed = timing.measure(sandbox, target.kernel, path, cases, timeout_s=600)["default"]
            except ToolError as error:
                row["against"][opponent] = {"error": str(error)}
                continue
            row |= {key: timed.timing.to_json()[key] for key in ("latency_us", "gpu_us", "gpu_state")}
            theirs = statistics.median(time for run in timed.runs for pair in run.b_us for time in pair)
            row["against"][opponent] = {**pairing.compare(timed.runs).to_json(), "us": theirs}
    work = task.work["default"]
    roof = roofline.roof_for(platforms.of_task(workspace, task), work)
    row["ours_us"] = ours_us(row["against"]["eager"])
    row |= roofline.utilization(row["ours_us"], work.flops, work.bytes_min, roof).to_json()
    if row["bound"] == "memory":
        mix = {"bytes_in": work.bytes_in, "bytes_out": work.bytes_out, "dtype": work.dtype}
        _, ceiling = card_rates.run("ceiling", {**mix, "rep_ms": 100}, 300)
        row["ceiling"] = ceiling.best.to_json()
    return row


def ours_us(eager: dict) -> float:
    """Our time in the pairs with PyTorch: its median over the ratio. do_bench, which calls one kernel only, heats the
    card more or less than two in turn do, so its median fits no ratio."""
    return eager["us"] / eager["speedup"]["point"]


def minutes(first: str, last: str) -> float:
    """Between two timestamps of records."""
    times = [datetime.datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (first, last)]
    return round((times[1] - times[0]).total_seconds() / 60, 1)


def files(workspace: Workspace, scratch: Path) -> dict[str, Path]:
    """{opponent: its file}"""
    opponents = {}
    for number, name in enumerate(baselines.MODES):
        opponents[name] = scratch / f"opponent_{number}.py"
        opponents[name].write_bytes(baselines.source(workspace.reference.read_bytes(), name))
    own = sorted((workspace.root / "opponents").glob("*.py"))
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
            *(measured_cells(row, names) if row["status"] == "OK" else [row["summary"]]),
        ]
        lines.append("| " + " | ".join(cells) + " |" + " |" * (len(titles) - len(cells)))
    return "\n".join(lines)


def measured_cells(row: dict, names: list[str]) -> list[str]:
    others = [f"{name}: {cell(result)}" for name, result in row["against"].items() if name not in names]
    rate, share = f"{row['tflops']:.0f} TFLOPS", "–"
    if row["bound"] == "memory":
        reached, ceiling = row["bandwidth_gbps"], row["ceiling"]["median"]
        rate, share = f"{reached:.0f} GB/s", f"{100 * reached / ceiling:.1f} % of {ceiling:.0f} GB/s"
    return [
        f"{row['ours_us']:.1f}",
        f"{row['latency_us']['median']:.1f}",
        f"{row['floor_share_pct']:.1f} % of {row['floor_us']:.1f} us",
        rate,
        share,
        *(cell(row["against"][name]) for name in names),
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
