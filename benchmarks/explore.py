#!/usr/bin/env python3
"""How long an exploration takes from a cold start, and whether its leader is the gate's choice, on a machine with a
GPU: python benchmarks/explore.py [--runs N] [--gate] [--problem NAME] [--json]

24 Triton products, 12 CUDA C++ softmaxes, 8 Triton RMSNorms whose times lie close together, and 12 Triton RMSNorms of
which three are wrong, one hangs and one does not compile; each checked and timed. Goals on an H100: 60 s for the
products and 90 s for the softmaxes. With --runs N each problem is explored N times.
With --gate the close candidates are then compared as the gate does, in pairs and in fresh processes: a run led to the
gate's choice if that comparison calls nothing else faster than the run's leader. Goal: 19 of 20 runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "exploration"
TOOLS = FOLDER.parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
from kernelopt.explore import candidates

PROBLEMS = {"product": 24, "softmax": 12, "rmsnorm": 8, "faulty": 12}  # candidates
CLOSE = 1.01  # a candidate this near to a leader may be the gate's choice


def answer(tool: str, *options: object) -> dict:
    """What a tool prints with --json."""
    command = [sys.executable, TOOLS / tool, *map(str, options), "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout)


def reference_of(problem: str) -> Path:
    return FOLDER / f"{'rmsnorm' if problem == 'faulty' else problem}_reference.py"


def explored(problem: str, budget_s: float) -> dict:
    """One exploration without any cache: its rows, and the seconds it took as a whole."""
    began = time.monotonic()
    files = [FOLDER / f"{problem}_space.py", "--reference", reference_of(problem)]
    run = answer("explore_kernels.py", *files, "--budget-seconds", budget_s)
    total_s = time.monotonic() - began
    print(f"{problem}: {total_s:.1f} s, leader {run['rows'][0]['name']}", file=sys.stderr, flush=True)
    return {**run, "total_s": total_s}


def right(run: dict) -> list[dict]:
    """The rows of candidates that are right and timed, best first."""
    return [row for row in run["rows"] if row["status"] == "OK" and row["latency_us"] and not row["opponent"]]


def contenders(runs: list[list[dict]]) -> list[str]:
    """Who may be the gate's choice: who led a run, the most often first, and who was close to a leader. A run may have
    no row, where nothing was right in time."""
    led = Counter(rows[0]["name"] for rows in runs if rows)
    close = {
        row["name"]: None
        for rows in runs
        for row in rows
        if row["latency_us"]["median"] <= CLOSE * rows[0]["latency_us"]["median"]
    }
    return list(dict.fromkeys([*(name for name, _ in led.most_common()), *close]))


def choice(names: list[str], verdict: Callable[[str, str], str]) -> tuple[str, dict[str, str]]:
    """The gate's choice among the names, and the verdict of every other one against it. verdict(a, b): of a against b,
    FASTER, EQUAL, SLOWER or AMBIGUOUS."""
    best, verdicts = names[0], {}
    for name in names[1:]:
        verdicts[name] = verdict(name, best)
        if verdicts[name] == "FASTER":
            best, verdicts = name, {other: "" for other in verdicts if other != name} | {best: "SLOWER"}
    return best, {name: known or verdict(name, best) for name, known in verdicts.items()}


def gate_choice(problem: str, names: list[str]) -> tuple[str, dict[str, str]]:
    """`choice` by the paired timing of measure_kernel_time.py."""
    with tempfile.TemporaryDirectory(prefix="explore-") as folder:
        files = {}
        for number, candidate in enumerate(candidates.of_file(FOLDER / f"{problem}_space.py")):
            files[candidate.name] = Path(folder, f"candidate{number}.py")
            files[candidate.name].write_text(candidate.source)
        reference = ["--reference", reference_of(problem)]

        def verdict(name: str, best: str) -> str:
            pair = ["--kernel", files[name], "--against", files[best]]
            return answer("measure_kernel_time.py", *pair, *reference)["verdict"]

        return choice(names, verdict)


def summary(problem: str, runs: list[dict], gate: bool) -> dict:
    ranked = [right(run) for run in runs]
    leaders = [rows[0]["name"] if rows else None for rows in ranked]
    most, count = (Counter(filter(None, leaders)).most_common(1) or [(None, 0)])[0]
    times = [row["latency_us"]["median"] for rows in ranked for row in rows if row["name"] == most]
    report = {
        "problem": problem,
        "device": runs[0]["device"],
        "candidates": PROBLEMS[problem],
        "right": [len(rows) for rows in ranked],
        "statuses": [dict(Counter(row["status"] for row in run["rows"] if not row["opponent"])) for run in runs],
        "total_s": [round(run["total_s"], 1) for run in runs],
        "leaders": dict(Counter(leaders)),
        "leader_us": [round(time, 2) for time in times],
        "led": f"{count} of {len(runs)}",
    }
    if gate and any(ranked):
        best, verdicts = gate_choice(problem, contenders(ranked))
        agreed = sum(name == best or verdicts.get(name, "SLOWER") != "SLOWER" for name in leaders)
        report |= {"gate_choice": best, "against_it": verdicts, "agreed": f"{agreed} of {len(runs)}"}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--gate", action="store_true", help="compare the close candidates as the gate does")
    parser.add_argument("--budget-seconds", type=float, default=90)
    parser.add_argument("--problem", choices=PROBLEMS, action="append")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for problem in args.problem or PROBLEMS:
        runs = [explored(problem, args.budget_seconds) for _ in range(args.runs)]
        report = summary(problem, runs, args.gate)
        print(json.dumps(report) if args.json else "\n".join(f"{key}: {value}" for key, value in report.items()))


if __name__ == "__main__":
    main()
