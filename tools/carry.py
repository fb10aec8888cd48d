#!/usr/bin/env python3
"""Carry a workspace to a GPU that has no connection to this machine, as one file, and the verdicts back.

pack      the workspace with the candidates that wait: kernel.py with its plan, what a stopped loop left, and
          waiting/NAME.py with the plan waiting/NAME.md
judge     on the machine with the GPU: put each through the gate, profile the best version; a run that was stopped goes
          on. exit 1: none was accepted
unpack    bring records, commits, rejected kernels and profiles home, unless the workspace was changed meanwhile"""

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.loop import carried
from kernelopt.session.workspace import Workspace

EXAMPLES = """examples:
  carry.py pack W --out trip.tar.gz
  carry.py judge trip.tar.gz
  carry.py unpack trip.judged.tar.gz W"""


def main() -> int:
    args = arguments()
    if args.verb == "pack":
        names = carried.pack(Workspace(args.workspace), args.out)
        cli.emit({"file": str(args.out), "waiting": names}, args.json, [f"{args.out}: {', '.join(names)}"])
        return 0
    if args.verb == "judge":
        out = args.out or args.file.with_name(f"{args.file.name.removesuffix('.tar.gz')}.judged.tar.gz")
        judged = carried.judge(args.file, out, args.timeout, args.sandbox, cli.say)
        result = {"file": str(out), "judged": [asdict(one) for one in judged]}
        cli.emit(result, args.json, [*(one.line() for one in judged), f"bring it home: carry.py unpack {out} W"])
        return 0 if any(one.accepted for one in judged) else 1
    verdicts = carried.unpack(args.file, Workspace(args.workspace))
    cli.emit({"verdicts": list(verdicts)}, args.json, [*verdicts, f"brought home to {args.workspace}"])
    return 0


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="pack|judge|unpack")
    texts = {
        "pack": "write a workspace and its waiting candidates to a file",
        "judge": "judge the candidates of such a file on this machine's GPU",
        "unpack": "bring the result into the workspace",
    }
    subs = {
        verb: verbs.add_parser(verb, help=text, description=text, allow_abbrev=False) for verb, text in texts.items()
    }
    subs["pack"].add_argument("workspace", type=Path, metavar="W")
    subs["pack"].add_argument("--out", type=cli.path, required=True, metavar="FILE", help="the file, NAME.tar.gz")
    subs["judge"].add_argument("file", type=cli.path, metavar="FILE", help="what pack wrote")
    subs["judge"].add_argument("--out", type=cli.path, metavar="FILE", help="the result (default NAME.judged.tar.gz)")
    cli.add_timeout(subs["judge"], 300)
    cli.add_sandbox(subs["judge"])
    subs["unpack"].add_argument("file", type=cli.path, metavar="RESULT", help="what judge wrote")
    subs["unpack"].add_argument("workspace", type=Path, metavar="W")
    for sub in subs.values():
        cli.add_json(sub)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
