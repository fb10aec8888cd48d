#!/usr/bin/env python3
"""How long an exploration takes from a cold start, on a machine with a GPU: python benchmarks/explore.py [--runs N]
[--json]

24 Triton products and 12 CUDA C++ softmaxes, each checked and timed. With --runs N each is explored N times, and the
leaders are compared: the spread of the median of the one that led most often. Goals on an H100: 60 s and 90 s.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "exploration"
TOOL = FOLDER.parents[1] / "tools" / "explore_kernels.py"
PROBLEMS = {"product": 24, "softmax": 12}  # candidates


def explored(name: str, budget_s: float) -> dict:
    """One exploration without any cache: its rows, and the seconds it took as a whole."""
    command = [sys.executable, TOOL, FOLDER / f"{name}_space.py", "--reference", FOLDER / f"{name}_reference.py"]
    began = time.monotonic()
    done = subprocess.run([*command, "--budget-seconds", str(budget_s), "--json"], stdout=subprocess.PIPE, text=True)
    return {**json.loads(done.stdout), "total_s": time.monotonic() - began}


def summary(name: str, runs: list[dict]) -> dict:
    leaders = Counter(run["rows"][0]["name"] for run in runs)
    most, count = leaders.most_common(1)[0]
    times = [
        row["latency_us"]["median"] for run in runs for row in run["rows"] if row["name"] == most and row["latency_us"]
    ]
    return {
        "problem": name,
        "device": runs[0]["device"],
        "candidates": PROBLEMS[name],
        "right": [sum(row["status"] == "OK" and not row["opponent"] for row in run["rows"]) for run in runs],
        "total_s": [round(run["total_s"], 1) for run in runs],
        "leaders": dict(leaders),
        "leader_us": [round(time, 2) for time in times],
        "led": f"{count} of {len(runs)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--budget-seconds", type=float, default=90)
    parser.add_argument("--problem", choices=PROBLEMS, action="append")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in args.problem or PROBLEMS:
        found = summary(name, [explored(name, args.budget_seconds) for _ in range(args.runs)])
        print(json.dumps(found) if args.json else "\n".join(f"{key}: {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
