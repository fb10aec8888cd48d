#!/usr/bin/env python3
"""Are a workspace's Stop Conditions met? Compares its targets with the record of the best accepted version.

exit 0: met. exit 1: not met, not measured, or the evidence no longer belongs to kernel.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli, gate
from kernelopt.errors import Refused
from kernelopt.memory import Memory
from kernelopt.workspace import Workspace, digest


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("workspace", type=Path, metavar="WORKSPACE")
    cli.add_json(parser)
    args = parser.parse_args()
    workspace = Workspace(args.workspace)
    targets = workspace.task()["targets"]
    if not targets:
        raise Refused("no targets are set; run: compute_utilization.py --workspace W --set-targets")
    best = Memory(workspace).best()
    result = {"version": best["version"] if best else None, **gate.goal(targets, best)}
    if best and best["kernel_sha256"] != digest(workspace.kernel):
        result["met"] = False
        cli.say(f"check_goal.py: kernel.py is not the accepted {best['version']}: what was measured is another kernel")
    cli.emit(result, args.json, [line(target) for target in result["targets"]])
    return 0 if result["met"] else 1


def line(target: dict) -> str:
    achieved = "not measured" if target["achieved"] is None else f"{target['achieved']:.2f} {target['unit']}"
    state = "met" if target["met"] else "NOT met"
    return f"{target['workload']} {target['metric']}: {achieved}, target {target['target']} {target['unit']}: {state}"


if __name__ == "__main__":
    cli.run(main)
