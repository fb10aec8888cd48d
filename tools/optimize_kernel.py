#!/usr/bin/env python3
"""Rounds without a person: an agent's command gets a brief on stdin, leaves kernel.py and a plan; verify, gate, record.

The command runs in a git clone of its own, outside the workspace, and may write kernel.py and plan.md there. Needs an
accepted v0 and a GPU. exit 0: the targets are met; exit 1: it stopped for another reason."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.errors import UsageError
from kernelopt.loop import agent_process, executors, gpu_steps, loop, run_files, snapshot, stopping, strategies
from kernelopt.session.workspace import Workspace

EXAMPLES = """examples:
  optimize_kernel.py --workspace W --agent 'claude -p --permission-mode acceptEdits --allowedTools Bash'
  optimize_kernel.py --workspace W --agent 'codex exec --sandbox workspace-write -' --rounds 12 --budget-minutes 90
  optimize_kernel.py --workspace W --agent 'gemini --approval-mode=yolo --skip-trust' --resume"""

SIDE_BY_SIDE = 64  # each is an agent, its clone and its verifications


def main() -> int:
    args = arguments()
    if args.candidates > SIDE_BY_SIDE:
        raise UsageError(f"--candidates: at most {SIDE_BY_SIDE} side by side")
    workspace = opened(args.workspace)
    limits = stopping.Limits(
        rounds=args.rounds,
        minutes=args.budget_minutes,
        agent_calls=args.agent_calls,
        patience=args.patience,
        restarts=args.restarts,
        refinements=args.refinements,
        agent_timeout_s=args.agent_timeout,
        candidates=args.candidates,
    )
    os.environ["KERNELOPT_ON"] = args.on  # for the tools that agents call
    strategy = strategies.Beam(args.beam) if args.beam else strategies.Greedy()
    wrapper = agent_process.read_only(workspace.root)
    with executors.at(args.on, workspace, args.timeout) as executor, workspace.locked():
        steps = gpu_steps.GpuSteps(workspace, executor, cli.say)
        run = loop.Loop(workspace, args.agent, limits, steps, executor, cli.say, strategy, wrapper)
        result = run.run(args.resume)
    cli.emit(result.to_json(), args.json, lines(result))
    return 0 if result.met else 1


def opened(root: Path) -> Workspace:
    """The workspace. When a killed run's agent has removed its files or its history, they are restored first."""
    if not all((root / name).exists() for name in ("README.md", "reference.py", ".git")) and (
        before := snapshot.Snapshot.load(root)
    ):
        put_back = before.restore(run_files.RunFiles(root / ".loop").distrust)
        cli.say(f"optimize_kernel.py: put back, as they were before a kill: {', '.join(put_back[:5])}")
    return Workspace(root)


def lines(result: stopping.LoopResult) -> list[str]:
    text = [
        f"stopped: {result.reason}",
        f"best: {result.best}, {result.latency_us:.2f} us, after {result.rounds} rounds",
    ]
    return text + [
        f"against {name}: {comparison.verdict}, {comparison.describe()}" for name, comparison in result.final.items()
    ]


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("--workspace", type=Path, required=True, help="with an accepted v0")
    parser.add_argument("--agent", type=cli.filled, required=True, metavar="COMMAND", help="gets the brief on stdin")
    parser.add_argument("--rounds", type=cli.positive_int, default=10, help="the most rounds (default 10)")
    parser.add_argument("--candidates", type=cli.positive_int, default=1, help="side by side in a round (default 1)")
    parser.add_argument(
        "--beam", type=cli.positive_int, metavar="N", help="start from the N fastest right versions in turn"
    )
    parser.add_argument("--budget-minutes", type=cli.positive_float, default=240, help="the longest run (default 240)")
    parser.add_argument(
        "--agent-calls", type=cli.positive_int, default=40, help="the most calls of the agent (default 40)"
    )
    parser.add_argument("--patience", type=cli.positive_int, default=4, help="rounds without a gain: stuck (default 4)")
    parser.add_argument("--restarts", type=cli.natural, default=1, help="partial restarts when stuck (default 1)")
    parser.add_argument("--refinements", type=cli.natural, default=2, help="times an error is handed back (default 2)")
    parser.add_argument("--agent-timeout", type=cli.positive_float, default=1200, help="seconds a call (default 1200)")
    parser.add_argument("--timeout", type=cli.positive_float, default=300, help="seconds per process (default 300)")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was killed")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
