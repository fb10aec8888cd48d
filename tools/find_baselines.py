#!/usr/bin/env python3
"""Opponents for an operator: what a user would call instead, as files that explore_kernels.py takes with --against.

Each file has kernel_function, with the arguments that are printed; its constants stand at its top. Copy it and change
them where your task differs. Opponents are timed, not checked."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.hardware import wiki, wiki_baselines

EXAMPLES = """examples:
  find_baselines.py norms
  find_baselines.py rms norm --json
  find_baselines.py --list"""
ALWAYS = "For any task, --against also takes: eager, torch.compile, 'torch.compile max-autotune', best"


def main() -> int:
    args = arguments()
    baselines = wiki_baselines.all_of(wiki.root(args.gpu_wiki))
    if args.operator:
        baselines = wiki_baselines.for_operator(baselines, " ".join(args.operator))
    result = {"baselines": [to_json(baseline) for baseline in baselines]}
    cli.emit(result, args.json, [*map(for_people, baselines), ALWAYS])
    return 0


def to_json(baseline: wiki_baselines.Baseline) -> dict:
    return {
        "operator": baseline.operator,
        "file": str(baseline.file),
        "does": baseline.does,
        "arguments": baseline.arguments,
        "needs_gpu": baseline.needs_gpu,
        "package": baseline.package,
        "installed": baseline.package and wiki_baselines.installed_version(baseline.package),
        "interface": baseline.interface,
    }


def for_people(baseline: wiki_baselines.Baseline) -> str:
    lines = [str(baseline.file), f"  {baseline.does}", f"  arguments: {baseline.arguments}"]
    if baseline.package:
        version = wiki_baselines.installed_version(baseline.package)
        lines.append(f"  package: {baseline.package}, {version or 'not installed here'}; not run by us")
    if baseline.interface:
        lines.append(f"  interface: {baseline.interface}")
    return "\n".join(lines)


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("operator", nargs="*", default=[], help="a page of docs/operators, or words, such as: rms norm")
    choice.add_argument("--list", action="store_true", help="the opponents of all operators")
    cli.add_gpu_wiki(parser)
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
