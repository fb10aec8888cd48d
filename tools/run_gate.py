#!/usr/bin/env python3
"""The one way into a workspace's history: verify kernel.py, time it against the best version, accept or revert.

Accepted: a commit, and a record that names it. Rejected: a record of why, kernel.py as it was, the refused kernel in
rejected/. Needs plans/vN_plan.md (from v1 on) and a GPU: a run in the CPU interpreter is never accepted.
A signal before the verdict: exit 4, nothing is recorded, and a sentence says how far it came."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device.stop_signal import Stop
from kernelopt.gate import rounds
from kernelopt.session.workspace import Workspace


def main() -> int:
    args = arguments()
    workspace, stop = Workspace(args.workspace), Stop()
    cli.handle(stop.signalled, signal.SIGTERM, signal.SIGINT)
    with workspace.locked():
        result = rounds.judge(workspace, args.version, args.timeout, cli.say, args.sandbox, stop=stop)
    cli.emit(result.to_json(), args.json, result.lines())
    return 0 if result.decision.accepted else 1


def arguments():
    parser = cli.parser(__doc__)
    cli.add_workspace(parser, required=True)
    parser.add_argument("--version", required=True, help="the version that kernel.py is to become, for example v1")
    cli.add_sandbox(parser)
    cli.add_timeout(parser, rounds.TIMEOUT_S)
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
