#!/usr/bin/env python3
"""Partial restart: masks half of the records at random, and prints a brief for an agent with fresh eyes.

v0 and the best version stay. Nothing is deleted: memory/restarts.json lists the masked records, and --undo reverts the
last restart. exit 1: fewer than two records may be masked, or there is no restart to undo.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.loop import restart
from kernelopt.session.workspace import Workspace

EXAMPLES = """examples:
  partial_restart.py W > /tmp/brief.md
  partial_restart.py W --seed 7 --json
  partial_restart.py W --undo"""


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace)
    if args.undo:
        result = restart.undo(workspace)
        lines = [result.describe()]
    else:
        result = restart.begin(workspace, args.seed)
        cli.say(f"partial_restart.py: masked {' '.join(result.masked)}; --undo takes them back")
        lines = [result.describe(), "", result.brief]
    for message in result.left_out:
        cli.say(f"partial_restart.py: left out: {message}")
    cli.emit(result.to_json(), args.json, lines)
    return 0


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("workspace", type=Path, metavar="WORKSPACE")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--seed",
        type=cli.natural,
        default=restart.random_seed(),
        help="the same seed masks the same records (default: random, and printed)",
    )
    action.add_argument("--undo", action="store_true", help="unmask what the last restart masked")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
