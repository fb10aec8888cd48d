#!/usr/bin/env python3
"""A session of one problem of the hard deck, by the bundle's own tools: a first version, an exploration, its leader.

On a machine with an NVIDIA GPU: python benchmarks/hard_deck/session.py NAME [--root /tmp] [--platform H200]
A step that fails ends the session with its exit code; the workspace stays. A refused v1 is still profiled and reported.
Each step's seconds are printed, and written to seconds.json in the workspace."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

DECK = Path(__file__).resolve().parent
ROOT = DECK.parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from kernelopt import cli
from kernelopt.explore import run


@dataclass(frozen=True)
class Problem:
    """A folder here: reference.py, v0.py, v1_plan.md, candidates/, opponents/ and about.json. share_pct: of the
    attainable rate, the target; at small sizes launch and ramp-up take most of the time."""

    folder: Path
    framework: str
    notes: str
    explore_seconds: int
    share_pct: int

    @classmethod
    def read(cls, name: str) -> "Problem":
        folder = DECK / name
        return cls(folder, **json.loads((folder / "about.json").read_text()))

    def files(self, part: str) -> list[Path]:
        return sorted((self.folder / part).glob("*.py"))


class Session:
    """Runs the tools on one workspace."""

    def __init__(self, problem: Problem, root: Path):
        self.problem, self.workspace = problem, root / f"kernel_opt_{problem.folder.name}"
        self.seconds: dict[str, float] = {}

    def step(self, title: str, *command, may_fail: bool = False) -> None:
        print(f"\n=== {title}", flush=True)
        start = time.monotonic()
        starter = ["bash"] if str(command[0]).endswith(".sh") else [sys.executable]
        done = subprocess.run([*starter, *map(str, (ROOT / command[0], *command[1:]))])
        self.seconds[title] = round(time.monotonic() - start, 1)
        print(f"=== {self.seconds[title]} s, exit {done.returncode}", flush=True)
        if done.returncode and not may_fail:
            sys.exit(done.returncode)

    def start(self, platform: str) -> None:
        name, files = self.problem.folder.name, (self.problem.folder / "v0.py", self.problem.folder / "reference.py")
        task = ("--platform", platform, "--framework", self.problem.framework, "--notes", self.problem.notes)
        root = ("--root", self.workspace.parent)
        self.step("start", "reference/workspace_init.sh", name, files[0], "--reference", files[1], *task, *root)
        self.step("least work", "tools/estimate_work.py", "--workspace", self.workspace)
        targets = ("--set-targets", "--share", self.problem.share_pct)
        self.step("targets", "tools/compute_utilization.py", "--workspace", self.workspace, *targets)

    def judge(self, version: str) -> None:
        at = ("--workspace", self.workspace, "--version", version)
        self.step(f"gate {version}", "tools/run_gate.py", *at, may_fail=version != "v0")
        self.step(f"profile {version}", "tools/profile_kernel.sh", *at)

    def explore(self) -> None:
        """Explores the candidates, keeps the leader as kernel.py, and writes the plan that cites it."""
        opponents = [part for path in self.problem.files("opponents") for part in ("--against", path)]
        seconds = self.problem.explore_seconds / (1 - run.OTHERS_SHARE)  # explore_seconds are of the first workload
        budget = ("--workload", "all", "--budget-seconds", round(seconds))
        at = ("--workspace", self.workspace)
        candidates = self.problem.files("candidates")
        self.step("explore", "tools/explore_kernels.py", *candidates, *at, "--against", "best", *opponents, *budget)
        name, ratio = leader(json.loads((self.workspace / "explore" / "e1.json").read_text())["rows"])
        self.step("keep the leader", "tools/explore_kernels.py", *at, "--keep", name)
        plan = (self.problem.folder / "v1_plan.md").read_text()
        plan = plan.replace("NAME", name).replace("RATIO", ratio)
        (self.workspace / "plans" / "v1_plan.md").write_text(plan)

    def end(self) -> None:
        self.step("report", "tools/render_report.py", self.workspace)
        (self.workspace / "seconds.json").write_text(json.dumps(self.seconds, indent=1) + "\n")


def leader(rows: list[dict]) -> tuple[str, str]:
    """(name, speed-up over the best version on the default workload) of the fastest candidate of an exploration that is
    right on all workloads that it was tried on. Of those that are level with it on all, the one with a file's own
    constants: others may differ in what no workload runs."""
    right = [row for row in rows if not row["opponent"] and all(one["status"] in ("OK", None) for one in at_all(row))]
    if not right:
        sys.exit("session.py: no candidate of the exploration is right; its table says why")
    most = max(len(at_all(row)) for row in right)
    right = [row for row in right if len(at_all(row)) == most]
    level = [row for row in right if not any(one["dropped"] for one in at_all(row))] or right[:1]
    row = next((row for row in level if "[" not in row["name"]), level[0])
    against = row["against_best"]  # None where the best version was dropped before this one was timed
    return row["name"], f"{against['point']:.2f}x" if against else "an unknown multiple"


def at_all(row: dict) -> list[dict]:
    """What a row says at each workload, the first one first."""
    return [row, *row.get("others", {}).values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.parent.name for path in DECK.glob("*/about.json"))
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--root", type=Path, default=Path("/tmp"), help="where the workspace is made (%(default)s)")
    parser.add_argument("--platform", default="H200", help="the GPU, as the wiki names it (%(default)s)")
    args = parser.parse_args()
    session = Session(Problem.read(args.name), args.root)
    session.start(args.platform)
    session.judge("v0")
    session.explore()
    session.judge("v1")
    session.end()
    return 0


if __name__ == "__main__":
    cli.run(main)
