#!/usr/bin/env python3
"""Partial restart: masks half of the records at random, and prints a brief for an agent with fresh eyes.

v0 and the best version stay. Nothing is deleted: memory/restarts.json keeps what was masked, --undo takes the last restart back.
exit 1: fewer than two records may be masked, or there is no restart to undo."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli, gate, restart
from kernelopt.errors import Refused, UsageError
from kernelopt.memory import Memory, now
from kernelopt.workspace import Workspace, digest

EXAMPLES = """examples:
  partial_restart.py W > /tmp/brief.md
  partial_restart.py W --seed 7 --json
  partial_restart.py W --undo"""


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace)
    memory = Memory(workspace)
    with memory.locked():
        result, lines = undo(memory) if args.undo else begin(workspace, memory, args.seed)
    for message in memory.left_out():
        cli.say(f"partial_restart.py: left out: {message}")
    cli.emit(result, args.json, lines)
    return 0


def begin(workspace: Workspace, memory: Memory, seed: int) -> tuple[dict, list[str]]:
    """Mask, and write the brief. It is noted before it is done, so that --undo also mends a restart that died half-way."""
    past, best = journal(memory), memory.best()
    if gate.goal(workspace.task()["targets"], best)["met"]:
        raise Refused(f"the targets are met by {best['version']}; there is nothing to restart for")
    if best and best["kernel_sha256"] != digest(workspace.kernel):
        raise UsageError(
            f"kernel.py is not the accepted {best['version']}; put it back: "
            f"git -C {workspace.root} checkout {best['git_commit_hash']} -- kernel.py"
        )
    before = [record["version"] for record in memory.scan()]
    chosen = restart.draw(before, best and best["version"], seed)
    entry = {"when": now(), "seed": seed, "masked": chosen, "undone": None}
    bundle.write_json(memory.restarts, [*past, entry])
    memory.set_masked(chosen, True)
    cli.say(f"partial_restart.py: masked {' '.join(chosen)}; --undo takes them back")
    records = memory.records()
    hidden = set(memory.versions()) - {record["version"] for record in records} - {best["version"] if best else ""}
    following = memory.next_version()
    text = restart.hand_over(workspace.root, workspace.task(), best, records, hidden, following)
    result = {"masked": chosen, "seed": seed, "next_version": following, "brief": text}
    said = f"{len(chosen)} of {len(before)} unmasked records are masked now, seed {seed}; next version: {following}"
    return result, [said, "", text]


def undo(memory: Memory) -> tuple[dict, list[str]]:
    """Unmask what the last restart masked, but for records that were removed since."""
    past = journal(memory)
    entry = restart.last(past)
    recorded = set(memory.versions())
    back = [version for version in entry["masked"] if version in recorded]
    memory.set_masked(back, False)
    entry["undone"] = now()
    bundle.write_json(memory.restarts, past)
    following = memory.next_version()
    return {"unmasked": back, "next_version": following}, [f"unmasked: {' '.join(back)}; next version: {following}"]


def journal(memory: Memory) -> list[dict]:
    """The restarts of this workspace; UsageError when the file holds something else, which then stays as it is."""
    if not memory.restarts.exists():
        return []
    past = bundle.read_json(memory.restarts)
    if not restart.is_journal(past):
        raise UsageError(f"{memory.restarts} is no list of restarts; mend or remove it")
    return past


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("workspace", type=Path, metavar="WORKSPACE")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--seed",
        type=cli.natural,
        default=random.SystemRandom().randrange(2**32),
        help="the same seed masks the same records (default: random, and told)",
    )
    what.add_argument("--undo", action="store_true", help="unmask what the last restart masked")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
