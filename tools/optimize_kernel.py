#!/usr/bin/env python3
"""Rounds without a person: an agent gets a brief on stdin, leaves kernel.py and a plan; verify, gate, record.

The agent is a known client, or any command. It runs in a git clone of its own, outside the workspace, and may write
kernel.py and plan.md there. Needs an accepted v0 and a GPU. exit 0: the targets are met; exit 1: it stopped for
another reason."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.errors import UsageError
from kernelopt.loop import agent_process, clients, executors, gpu_steps, loop, run_files, snapshot, stopping, strategies
from kernelopt.session.workspace import Workspace

EXAMPLES = """examples:
  optimize_kernel.py --workspace W --client claude
  optimize_kernel.py --workspace W --client codex --model gpt-5.5 --rounds 12 --budget-minutes 90
  optimize_kernel.py --workspace W --agent './my_agent --brief -' --resume"""

WITHOUT_SANDBOX = "in a container, or in another sandbox, they run without it by --unconfined"
SIDE_BY_SIDE = 64  # each is an agent, its clone and its verifications


def main() -> int:
    args = arguments()
    if args.candidates > SIDE_BY_SIDE:
        raise UsageError(f"--candidates: at most {SIDE_BY_SIDE} side by side")
    client, command = agent(args)
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
    sees_gpu = args.unconfined or args.network or not (client and client.hides_gpu)
    os.environ["KERNELOPT_ON"] = args.on if sees_gpu else "local"  # for the tools that agents call
    strategy = strategies.Beam(args.beam) if args.beam else strategies.Greedy()
    wrapper = agent_process.read_only(workspace.root)
    with executors.at(args.on, workspace, args.timeout) as executor, workspace.locked():
        steps = gpu_steps.GpuSteps(workspace, executor, cli.say, sees_gpu)
        run = loop.Loop(workspace, command, limits, steps, executor, cli.say, strategy, wrapper, client)
        result = run.run(args.resume)
    cli.emit(result.to_json(), args.json, lines(result))
    return 0 if result.met else 1


def agent(args) -> tuple[clients.Client | None, str]:
    """(the known client, if it is one; the agent's command)"""
    if args.client is None:
        for option in ("model", "unconfined", "network"):
            if getattr(args, option):
                raise UsageError(f"--{option} goes with --client; put it into the command of --agent")
        return None, args.agent
    client = clients.CLIENTS[args.client]
    for option in ("unconfined", "network"):
        if getattr(args, option) and not getattr(client, option):
            raise UsageError(f"--{option}: {args.client} runs without a sandbox of its own anyway; leave it out")
    if args.network and args.on == "local":
        raise UsageError("--network lets agents reach a GPU node; name it with --on")
    clients.require_installed(args.client)
    if not args.unconfined:
        clients.require_sandbox(args.client, WITHOUT_SANDBOX)
    return client, client.command_line(args.model, args.unconfined, args.network)


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
    add, number, seconds = parser.add_argument, {"type": cli.positive_int}, {"type": cli.positive_float, "metavar": "S"}
    add("--workspace", type=Path, required=True, metavar="W", help="with an accepted v0")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--client", choices=clients.CLIENTS, help="a client whose command line the loop knows")
    who.add_argument("--agent", type=cli.filled, metavar="COMMAND", help="reads the brief on stdin")
    add("--model", type=cli.filled, metavar="M", help="of the client (default: its own choice)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--unconfined", action="store_true", help="codex without its sandbox, which hides the GPU")
    where.add_argument("--network", action="store_true", help="codex with a network, so that agents use the node too")
    add("--rounds", **number, metavar="N", default=10, help="the most rounds (default 10)")
    add("--candidates", **number, metavar="N", default=1, help="side by side in a round (default 1)")
    add("--beam", **number, metavar="N", help="start from the N fastest right versions in turn")
    add("--budget-minutes", type=cli.positive_float, metavar="N", default=240, help="the longest run (default 240)")
    add("--agent-calls", **number, metavar="N", default=40, help="the most calls of the agent (default 40)")
    add("--patience", **number, metavar="N", default=4, help="rounds without a gain: stuck (default 4)")
    add("--restarts", type=cli.natural, metavar="N", default=1, help="partial restarts when stuck (default 1)")
    add("--refinements", type=cli.natural, metavar="N", default=2, help="times an error is handed back (default 2)")
    add("--agent-timeout", **seconds, default=1200, help="seconds a call (default 1200)")
    add("--timeout", **seconds, default=300, help="seconds per process (default 300)")
    add("--resume", action="store_true", help="go on with a run that was killed")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
