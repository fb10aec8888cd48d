#!/usr/bin/env python3
"""The one way into a workspace's history: verify kernel.py, time it against the best version, accept or revert.

Accepted: a commit, and a record that names it. Rejected: a record of why, kernel.py as it was, the refused kernel in
rejected/. Needs plans/vN_plan.md (from v1 on) and a GPU: a run in the CPU interpreter is never accepted."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device import spent
from kernelopt.gate import rounds
from kernelopt.hardware import roofline
from kernelopt.session.workspace import Workspace


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace)
    with workspace.locked():
        result = rounds.judge(workspace, args.version, args.timeout, cli.say, args.sandbox)
    cli.emit(result.to_json(), args.json, lines(result))
    return 0 if result.decision.accepted else 1


def lines(result: rounds.RoundResult) -> list[str]:
    decision, measured = result.decision, result.measurement
    text = [f"{result.version} {'ACCEPTED' if decision.accepted else 'REJECTED'}: {decision.reason}"]
    for name, timing in measured.timings.items():
        comparison = (measured.comparisons or {}).get(name)
        paired = f", {comparison.verdict} {comparison.describe()} against {measured.against}" if comparison else ""
        text.append(f"{name}: {timing.latency.median_us:.2f} us{paired}")
    if measured.utilization and measured.utilization.floor_us:
        beyond = roofline.beyond_floor(measured.utilization)
        text.append(roofline.share_words(measured.utilization) + (f"; {beyond}" if beyond else ""))
    if measured.seconds:
        steps = {step: seconds for step, seconds in measured.seconds.items() if step != "all"}
        text.append(spent.took(measured.seconds["all"], steps))
    if result.commit:
        text.append(f"commit {result.commit}")
    return text


def arguments():
    parser = cli.parser(__doc__)
    cli.add_workspace(parser, required=True)
    parser.add_argument("--version", required=True, help="the version that kernel.py is to become, for example v1")
    cli.add_sandbox(parser)
    cli.add_timeout(parser, 300)
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
