#!/usr/bin/env python3
"""Compile, check and time many candidates in one go; print a table, best first. Ratios are to the first of --against.

A candidate is a .py file with ModelNew or kernel_function, each file of a folder, or each configuration of a file with
a SPACE: a module-level list of dicts, or a dict of lists (their product); its names are constants of the module.
Each is checked on the task's inputs (one or two seeds), unless its PROBE is true; right ones and probes are timed.
With --device cpu-interpreter nothing is timed; --card compiles for a card that is not here: registers, spills, errors.
The gate decides: `--keep NAME` or `--keep-leader` writes a candidate to kernel.py; `--gate vN` judges the leader too.
With --workspace the table goes to explore/eN.json. Exit 1: none is right, or the gate rejects; 4: it was cut short."""

import contextlib
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.compiling import choosing
from kernelopt.device.sandbox import Sandbox
from kernelopt.device.stop_signal import Stop
from kernelopt.errors import Refused, Stopped, TimedOut, UsageError
from kernelopt.explore import candidates, headers, hints, opponents, run, store, table, workloads
from kernelopt.explore.candidates import Candidate
from kernelopt.gate import readiness, rounds
from kernelopt.gate.readiness import RoundStart
from kernelopt.hardware.targets import Target
from kernelopt.session import explorations, platforms
from kernelopt.session.explorations import Exploration
from kernelopt.session.subject import KernelUnderTest, of_reference
from kernelopt.session.task import Task
from kernelopt.session.workspace import Workspace
from kernelopt.statuses import Speed, Status

BUDGET_S = 90
MOST_JUDGED = 3  # leaders, until the gate accepts one as v0


def main() -> int:
    args = arguments()
    if args.keep and not args.kernels:
        print(store.keep(workspace_of(args), args.keep))
        return 0
    entries = candidates.from_paths(args.kernels)
    check_one_starts(entries)
    entries = hints.with_variants(entries) if args.hints else entries
    subject = of_reference(args)
    workspace = workspace_of(args) if args.keep else subject.workspace
    compile_for = target_of(args, subject)
    with ready_for_gate(workspace, args.gate), tempfile.TemporaryDirectory() as folder:
        others = opponents.of(subject, args.against, Path(folder), [entry.name for entry in entries])
        if args.keep_leader or args.gate:
            opponents.check_first(subject, others)
        started, stop = time.monotonic(), Stop()
        cli.handle(stop.signalled, signal.SIGTERM, signal.SIGINT)
        with Sandbox(args.device, subject.cache, args.sandbox, stop) as sandbox:
            if args.gate:
                platforms.check_platform(workspace, workspace.task(), sandbox.device_name)
            plan = plan_of(args, subject, entries, others, compile_for, sandbox.device_name)
            try:
                outcome = workloads.explore(plan, sandbox, cli.say, args.profile)
            except Stopped as stopped:
                raise Stopped(f"{stopped}, before the inputs were ready: there is no table") from None
            result = store.result_of(plan, outcome, sandbox.device_name, time.monotonic() - started)
            path = store.save(subject.workspace, result, outcome.entrants) if subject.workspace else None
            return shown_and_followed(args, workspace, result, path, sandbox)


@contextlib.contextmanager
def ready_for_gate(workspace: Workspace | None, version: str | None):
    """The workspace is locked for the gate, where one follows. What it would refuse is said before anything runs."""
    if version is None:
        yield
        return
    with workspace.locked():
        readiness.check_ready(RoundStart.of(workspace), version, kernel_follows=True)
        cli.say(f"the workspace and its plan are ready for the gate of {version}")
        yield


def shown_and_followed(args, workspace: Workspace | None, result: dict, path: Path | None, sandbox: Sandbox) -> int:
    """Print the table, do what was asked for after it, and return the exit code."""
    shown = {"file": path and str(path), **result}
    waits = args.gate and args.json  # one object holds both
    if not waits:
        cli.emit(shown, args.json, table.lines(result, path, advises=not args.gate))
        with contextlib.suppress(BrokenPipeError):
            cli.flush()  # a gate that is killed takes no table with it
    verdict = after = None
    exploration = explorations.of_result(result, path.stem) if path else None
    try:
        if args.keep:
            keep_named(workspace, args.keep, result)
        elif args.keep_leader or args.gate:
            verdict = kept_and_judged(workspace, exploration, args.gate, sandbox)
        after = verdict and next_run(exploration, args.gate, verdict, workspace.task())
    except store.NotFaster as refused:
        after = args.gate and next_run(exploration, args.gate, None, workspace.task())
        raise Refused(f"{refused}; {after}" if after else str(refused)) from None
    finally:
        if waits:
            cli.emit(shown | {"gate": verdict and verdict.to_json(), "next": after}, True, [])
    if verdict is None:
        return exit_code(result)
    if not waits:
        cli.emit({}, False, [*verdict.lines(), *filter(None, [after])])
    return 0 if verdict.decision.accepted else 1


def next_run(exploration: Exploration, version: str, verdict: rounds.RoundResult | None, task: Task) -> str | None:
    """`explorations.next_run` of this one. verdict: None where no candidate was faster for certain.
    One that is wrong, or slower at another workload, is to be mended, whatever it brought."""
    accepted = bool(verdict and verdict.decision.accepted)
    compared = (verdict and verdict.measurement.comparisons) or {}
    if verdict and not accepted:
        is_slow = verdict.measurement.verdict.status == Status.OK and compared
        if not is_slow or compared["default"].verdict == Speed.FASTER:
            return None
    gained = max((compared[one].speedup for one in {"default", *exploration.workloads} & {*compared}), default=None)
    work = (task.work or {}).get("default")
    has_less = work is None or work.windowed_pct > 0
    share = verdict.sustained_pct if accepted and not has_less else None
    return explorations.next_run(exploration, version, accepted, gained, share)


def keep_named(workspace: Workspace, name: str, result: dict) -> None:
    """Make this candidate kernel.py. A stop may have come before it was checked."""
    try:
        cli.say(store.keep(workspace, name))
    except UsageError as refused:
        if result["stopped_after_s"] is None:
            raise
        cli.say(str(refused))


def kept_and_judged(
    workspace: Workspace, exploration: Exploration, version: str | None, sandbox: Sandbox
) -> rounds.RoundResult | None:
    """Make the leader kernel.py, unless the exploration was stopped, and judge it as `version`, if there is one. The
    gate tries other sizes, layouts and values too: where v0 fails there, the next leader is judged, since no plan
    speaks for the first. The last verdict."""
    if exploration.was_stopped:
        cli.say("kernel.py was not written: the exploration was stopped")
        return None
    verdict = None
    for name in store.leaders(exploration)[: MOST_JUDGED if version == "v0" else 1]:
        if verdict:
            cli.say("\n".join(verdict.lines()))
        cli.say(store.keep(workspace, f"{exploration.name}#{name}"))
        if version:
            verdict = rounds.judge(workspace, version, rounds.TIMEOUT_S, cli.say, opened=sandbox)
        if verdict and verdict.decision.accepted:
            break
    return verdict


def exit_code(result: dict) -> int:
    """Of an exploration that nothing follows. Where none is right, and time was over before one could start, nobody
    knows whether that one is."""
    if result["stopped_after_s"] is not None:
        return Stopped.exit_code
    tried = [row for row in result["rows"] if not row["opponent"]]
    if any(map(is_usable, tried)):
        return 0
    return 1 if all(row["started"] for row in tried) else TimedOut.exit_code


def is_usable(row: dict) -> bool:
    """Is the candidate right on all workloads that it was tried on, or compiled where only a GPU can check it?"""
    if row["status"] == Status.NO_GPU and row["compiled"]:
        return row["compiled"]["status"] == Status.OK and bool(row["compiled"]["kernels"])
    return row["status"] == Status.OK and all(one["status"] in (None, Status.OK) for one in row["others"].values())


def check_one_starts(entries: list[Candidate]) -> None:
    """Refused, with the error of each, when no candidate can be started."""
    if all(entry.error for entry in entries):
        for entry in entries:
            cli.say(f"{entry.name}: {entry.error}")
        few = "the candidate cannot" if len(entries) == 1 else f"none of the {len(entries)} candidates can"
        raise Refused(f"{few} be started, so nothing was run")


def plan_of(
    args,
    subject: KernelUnderTest,
    entries: list[Candidate],
    others: dict[str, Path],
    compile_for: Target | None,
    device: str,
) -> run.Plan:
    """The exploration's plan. device: the name of the GPU, or of what stands in for it."""
    cli.say(f"exploring {len(entries)} candidate{'s' * (len(entries) > 1)} on {device}")
    budget_s, on_gpu = args.budget_seconds or BUDGET_S, args.device == "cuda"
    first, *also = args.workload
    plan = run.Plan(
        subject,
        entries,
        others,
        against=next(iter(others), None),
        workload="default" if first == run.ALL else first,
        also=(run.ALL,) if run.ALL in args.workload else tuple(also),
        budget_s=budget_s,
        candidate_s=args.candidate_seconds or run.seconds_each(budget_s, args.device),
        product=platforms.page_of(device, subject.workspace),
        compile_for=compile_for,
    )
    if not (on_gpu or args.budget_seconds):
        plan = headers.with_time(plan)
    if not args.candidate_seconds:
        plan = replace(plan, headers_s=headers.seconds_each(plan.budget_s))
    if warning := headers.warning(plan, on_gpu, budget_s):
        cli.say(warning)
    return plan


def target_of(args, kernel: KernelUnderTest) -> Target | None:
    """Without a GPU: what candidates are compiled for, --card or the workspace's platform; None when neither is
    known."""
    if args.device == "cuda":
        if args.card:
            raise UsageError("--card goes with --device cpu-interpreter; on a GPU candidates are compiled for it")
        return None
    return choosing.of_name(args.card, kernel.workspace) if args.card else choosing.of_platform(kernel.workspace)


def workspace_of(args) -> Workspace:
    if not args.workspace:
        raise UsageError("--keep writes kernel.py of a workspace; pass --workspace W")
    return Workspace(args.workspace)


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument("kernels", nargs="*", type=cli.path, metavar="KERNELS", help="files, or folders of them")
    cli.add_workspace(parser)
    parser.add_argument("--reference", type=Path, metavar="FILE", help="without a workspace: has Model and get_inputs")
    parser.add_argument("--dtype", type=cli.filled, help="with --reference: cast floating inputs to it")
    parser.add_argument(
        "--against",
        action="extend",
        nargs="+",
        type=cli.filled,
        metavar="X",
        help="timed too: best (default), eager, torch.compile, files",
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        type=cli.filled,
        default=["default"],
        metavar="X",
        help="names, or all: the first's leaders run on the others",
    )
    parser.add_argument("--hints", action="store_true", help="Triton also with hints to the L2 on its loads")
    parser.add_argument(
        "--profile", type=cli.natural, default=0, metavar="N", help="ncu's key metrics for the best N, 6 to 9 s each"
    )
    parser.add_argument(
        "--budget-seconds",
        type=cli.positive_float,
        metavar="S",
        help=f"for all (default {BUDGET_S}; CPU: more for torch's headers)",
    )
    parser.add_argument(
        "--candidate-seconds",
        type=cli.positive_float,
        metavar="S",
        help="for one (default: the budget; CPU: 1/3; headers: 135)",
    )
    parser.add_argument(
        "--card",
        type=cli.filled,
        help="without a GPU: compile for it, not for the platform",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--keep", type=cli.filled, metavar="NAME", help="write this candidate to kernel.py")
    kept.add_argument(
        "--keep-leader",
        action="store_true",
        help="write the fastest if it beats the best; else exit 1",
    )
    kept.add_argument("--gate", type=cli.filled, metavar="vN", help="--keep-leader, and judge it as this version")
    cli.add_device(parser)
    cli.add_sandbox(parser)
    cli.add_json(parser)
    args = parser.parse_args()
    if not args.kernels and not args.keep:
        parser.error("pass files or a folder of candidates, before --against and --workload, or --keep NAME")
    option = "--gate" if args.gate else "--keep-leader" if args.keep_leader else None
    if option and args.workspace is None:
        parser.error(f"{option} writes kernel.py of a workspace: pass --workspace W")
    if option and args.device != "cuda":
        parser.error(f"{option} goes by times, which only a GPU gives: leave --device and TRITON_INTERPRET out")
    return args


if __name__ == "__main__":
    cli.run(main)
