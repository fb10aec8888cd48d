#!/usr/bin/env python3
"""Rounds without a person: an agent's command gets a brief on stdin and leaves kernel.py and its plan; verify, gate, record, again.

The command runs in a git clone of its own (it may write kernel.py and plan.md there, nothing else). Needs an accepted v0 and
a GPU. State lies in W/.loop; a killed run goes on with --resume. exit 0: the targets are met; exit 1: it stopped for another reason."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import (
    audit,
    brief,
    bundle,
    cli,
    executors,
    gate,
    loop,
    memory,
    opponents,
    profile_analysis,
    profile_report,
    rounds,
    strategies,
    subject,
    timing,
    trial,
    wiki,
)
from kernelopt.errors import EnvironmentLacks, Refused, ToolError, UsageError
from kernelopt.restart import without_names
from kernelopt.sandbox import Sandbox
from kernelopt.workspace import Workspace

EXAMPLES = """examples:
  optimize_kernel.py --workspace W --agent 'claude -p --permission-mode acceptEdits'
  optimize_kernel.py --workspace W --agent 'codex exec --full-auto -' --rounds 12 --budget-minutes 90
  optimize_kernel.py --workspace W --agent 'gemini --yolo' --resume"""
TOOLS = Path(__file__).resolve().parent
INSTRUCTIONS = """
## What to leave here

You are in a git clone of your own, a copy of the workspace. Write these two files, and nothing else:

- `kernel.py`: one change to it, which keeps the interface (ModelNew or kernel_function).
- `plan.md`: copy {template} and fill it in; every section, one action, the expected effect before any measurement. A hardware value is
  copied with its citation from the GPU section above.

`reference.py` is the oracle; the verifier will run your kernel on other seeds, sizes and layouts. Timing is done after you, against the best version.
"""


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace)
    limits = loop.Limits(
        rounds=args.rounds,
        minutes=args.budget_minutes,
        agent_calls=args.agent_calls,
        patience=args.patience,
        restarts=args.restarts,
        refinements=args.refinements,
        agent_timeout_s=args.agent_timeout,
        candidates=args.candidates,
    )
    executor = executors.EXECUTORS[args.executor](workspace)
    machine = loop.Machine(
        brief=lambda version, number: brief_of(workspace, version, number),
        check=lambda kernel, plan: check(executor, workspace, kernel, plan, args.timeout),
        measure=lambda kernels: executors.measured(executor, workspace, kernels, args.timeout),
        restart=lambda: restart(workspace),
        slots=executor.slots,
    )
    strategy = strategies.Beam(args.beam) if args.beam else strategies.Greedy()
    with workspace.locked():
        driven = loop.Loop(workspace, args.agent, limits, machine, cli.say, strategy)
        result = driven.run(args.resume)
        result["final"] = final(workspace, args.timeout)
        driven.done()
    cli.emit(result, args.json, lines(result))
    return 0 if result["met"] else 1


def lines(result: dict) -> list[str]:
    text = [
        f"stopped: {result['reason']}",
        f"best: {result['best']}, {result['latency_us']:.2f} us, after {result['rounds']} rounds",
    ]
    return text + [
        f"against {name}: {found['verdict']}, {gate.describe(found)}" for name, found in result["final"].items()
    ]


def brief_of(workspace: Workspace, version: str, number: int) -> str:
    """The brief on a version, profiled first if it is not yet; for a candidate beside others, a direction of its own."""
    folder = workspace.profile(version, profile_report.MODE)
    if not (folder / "metrics.json").exists():
        command = [sys.executable, TOOLS / "profile_kernel.py", "--workspace", workspace.root, "--version", version]
        subprocess.run(command, stdout=subprocess.DEVNULL)
    instructions = INSTRUCTIONS.format(template=bundle.REFERENCE / "plan.md")
    if not (folder / "metrics.json").exists():
        return f"Make the kernel in kernel.py faster. It could not be profiled here.\n{instructions}"
    try:
        profile = profile_report.load(folder, workspace)
        found = profile_analysis.analysed(profile, [])
    except ToolError as error:
        return f"Make the kernel in kernel.py faster. Its profile says nothing: {error}\n{instructions}"
    records = memory.Memory(workspace)
    parts, left_out = brief.of_workspace(workspace, profile, found)
    for what in left_out:
        cli.say(f"optimize_kernel.py: not in the brief: {what}")
    prompts = brief.compose(parts, answer=instructions + direction(found["findings"], number))
    return without_names(f"{prompts['system']}\n\n{prompts['user']}", records.masked_versions())


def direction(findings: list[dict], number: int) -> str:
    """What a candidate is to go for, so that several of one round are not the same. Pure."""
    if number < len(findings):
        chosen = findings[number]
        return f"\nDirection of this candidate: {chosen['id']}: {chosen['actions'][0]}.\n"
    others = ", ".join(finding["id"] for finding in findings)
    return f"\nDirection of this candidate: one of your own; others are working on {others}.\n" if findings else ""


def check(executor, workspace: Workspace, kernel: Path, plan: Path, timeout_s: float) -> tuple[str, str]:
    """(status, message) of an agent's plan and of a quick verification of its kernel."""
    try:
        rounds.plan_fields(plan)
    except UsageError as error:
        return "PLAN", str(error)
    if problems := audit.of_files([plan], wiki.root(None), None).problems:  # held against the workspace that it lies in
        _, first = problems[0]
        return "PLAN", f"plan.md, line {first.line}: {first.message}"
    try:
        found = executor.examine("verify", trial.pack(workspace, kernel.read_bytes()), timeout_s)
    except EnvironmentLacks:
        raise
    except ToolError as error:
        return "CRASH", str(error)
    return found["status"], found["message"]


def restart(workspace: Workspace) -> str | None:
    """A partial restart; None when there is too little to mask. UsageError when the records of earlier ones are broken."""
    command = [sys.executable, TOOLS / "partial_restart.py", workspace.root]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode > Refused.exit_code:
        raise UsageError(done.stderr.strip())
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 else None


def final(workspace: Workspace, timeout_s: float) -> dict[str, dict]:
    """The best version against v0 and against torch.compile of the reference, each in paired runs: {name: comparison}.

    What cannot be compared is named and left out: the rounds were worth something without it."""
    found: dict[str, dict] = {}
    try:
        compare_at_the_end(workspace, timeout_s, found)
    except ToolError as error:
        cli.say(f"optimize_kernel.py: no comparison at the end: {error}")
    return found


def compare_at_the_end(workspace: Workspace, timeout_s: float, found: dict[str, dict]) -> None:
    records = memory.Memory(workspace)
    best, first = records.best(), records.read("v0")
    what = subject.of_workspace(workspace)
    with Sandbox("cuda", workspace.cache) as sandbox:
        kernel = workspace.extract(best["git_commit_hash"], sandbox.scratch)
        compiled = sandbox.scratch / "compiled.py"
        compiled.write_bytes(opponents.source(workspace.first_reference(), "torch.compile"))
        others = {"torch.compile": compiled}
        if best["version"] != "v0" and first["git_commit_hash"]:
            others["v0"] = workspace.extract(first["git_commit_hash"], sandbox.scratch)
        cases = timing.inputs(sandbox, what.reference, what.dtype, ["default"], timeout_s)
        for name, opponent in others.items():
            try:
                measured = timing.measure(sandbox, kernel, opponent, cases, timeout_s=timeout_s)
                found[name] = gate.paired_verdict(measured["default"]["rounds"])
            except ToolError as error:
                cli.say(f"optimize_kernel.py: not compared with {name}: {error}")


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("--workspace", type=Path, required=True, help="with an accepted v0")
    parser.add_argument("--agent", type=cli.filled, required=True, metavar="COMMAND", help="gets the brief on stdin")
    parser.add_argument("--rounds", type=cli.positive_int, default=10, help="at most so many (default 10)")
    parser.add_argument("--candidates", type=cli.positive_int, default=1, help="side by side in a round (default 1)")
    parser.add_argument(
        "--beam", type=cli.positive_int, metavar="N", help="start from the N fastest right versions in turn"
    )
    parser.add_argument(
        "--executor", choices=list(executors.EXECUTORS), default="local", help="whose GPUs (default local)"
    )
    parser.add_argument("--budget-minutes", type=cli.positive_float, default=240, help="at most so long (default 240)")
    parser.add_argument("--agent-calls", type=cli.positive_int, default=40, help="at most so many (default 40)")
    parser.add_argument("--patience", type=cli.positive_int, default=4, help="rounds without a gain: stuck (default 4)")
    parser.add_argument("--restarts", type=cli.natural, default=1, help="partial restarts when stuck (default 1)")
    parser.add_argument("--refinements", type=cli.natural, default=2, help="times an error is handed back (default 2)")
    parser.add_argument("--agent-timeout", type=cli.positive_float, default=1200, help="seconds a call (default 1200)")
    parser.add_argument("--timeout", type=cli.positive_float, default=300, help="seconds per process (default 300)")
    parser.add_argument("--resume", action="store_true", help="go on with a run that did not end")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
