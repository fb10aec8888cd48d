#!/usr/bin/env python3
"""Are a workspace's Stop Conditions met? Compares its targets with the record of the best accepted version.

exit 0: met. exit 1: not met, not measured, or the evidence no longer belongs to kernel.py.
--hook is for Claude Code's Stop hook: while the goal is armed and unmet the turn may not end, at most six times."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle
from kernelopt.session import stop_hook

COMMAND = f"python3 {Path(__file__).resolve()} W --hook"
HOOK = f"""Claude Code, in .claude/settings.json, where hooks run in the user's project, so with whole paths:
  {{"hooks": {{"Stop": [{{"hooks": [{{"type": "command", "command": "{COMMAND}"}}]}}]}}}}"""


def main() -> int:
    from kernelopt import cli
    from kernelopt.errors import Refused
    from kernelopt.session import explorations, stop_conditions
    from kernelopt.session.digests import digest
    from kernelopt.session.record_store import RecordStore
    from kernelopt.session.workspace import Workspace

    args = arguments(cli)
    workspace = Workspace(args.workspace)
    if args.arm or args.disarm:
        return arm(workspace.root, args.arm)
    targets = workspace.task().targets
    if not targets:
        raise Refused("no targets are set; run: compute_utilization.py --workspace W --set-targets")
    records = RecordStore(workspace)
    best = records.best()
    standings = stop_conditions.standings(targets, best)
    met = all(standing.met for standing in standings)
    if best and best.kernel_sha256 != digest(workspace.kernel):
        met = False
        cli.say(f"check_goal.py: kernel.py is not the accepted {best.version}: what was measured is another kernel")
    for is_so, what in (
        (stop_conditions.is_library_rate, "a library's rate is no floor"),
        (stop_conditions.is_of_other_cards, "other cards' rate is no floor of this one"),
    ):
        if met and any(is_so(standing.target) for standing in standings):
            cli.say(
                f"check_goal.py: {what}, and more may be possible; measure the floor: "
                f"measure_ceiling.py --workspace {workspace.root} --set-targets"
            )
    if not met and (little := explorations.little_came_of_the_last(workspace, records)):
        cli.say(f"check_goal.py: {little}")
    result = {
        "version": best.version if best else None,
        "met": met,
        "targets": [standing.to_json() for standing in standings],
    }
    cli.emit(result, args.json, [line(standing, stop_conditions.reach(standing.target)) for standing in standings])
    return 0 if met else 1


def arm(root: Path, on: bool) -> int:
    """Switch the blocking of --hook on or off."""
    armed = root / stop_hook.ARMED
    if on:
        bundle.write_text(armed.parent / ".gitignore", "*\n")
        bundle.write_json(armed, {"blocks": 0})
    else:
        armed.unlink(missing_ok=True)
    print("armed" if on else "disarmed")
    return 0


def arguments(cli):
    parser = cli.parser(f"{__doc__}\n\n{HOOK}")
    parser.add_argument("workspace", type=Path, metavar="WORKSPACE")
    hook_mode = parser.add_mutually_exclusive_group()
    hook_mode.add_argument("--hook", action="store_true", help="answer as Claude Code's Stop hook; always exit 0")
    hook_mode.add_argument("--arm", action="store_true", help="from now on --hook blocks until the goal is met")
    hook_mode.add_argument("--disarm", action="store_true", help="no longer")
    cli.add_json(parser)
    return parser.parse_args()


def line(standing, reach: str) -> str:
    target = standing.target
    achieved = "not measured" if standing.achieved is None else f"{standing.achieved:.2f} {target.unit}"
    state = "met" if standing.met else "NOT met"
    state += f"; {standing.problem}" if standing.problem else ""
    wanted = f"target {target.target} {target.unit}{reach}"
    return f"{target.workload} {target.metric}: {achieved}, {wanted}: {state}"


if __name__ == "__main__":
    if "--hook" in sys.argv and not {"-h", "--help"} & set(sys.argv):
        sys.exit(stop_hook.main([word for word in sys.argv[1:] if not word.startswith("--")]))
    from kernelopt import cli

    cli.run(main)
