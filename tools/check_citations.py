#!/usr/bin/env python3
"""Is every hardware value a citation that holds? Audits a workspace's README, plans, reports and records, or files.

Finds: wrong values, units, metrics and pages, moved lines, another product's page, hedges beside a value, figures with
a hardware unit that nobody cited or measured. exit 0: something was checked, and all of it holds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import audit, cli, wiki
from kernelopt.errors import UsageError
from kernelopt.workspace import Workspace


def main() -> int:
    args = arguments()
    found = audited(args)
    fixed = audit.fix(found) if args.fix else 0
    problems = [
        {"file": str(path), "line": problem.line, "kind": problem.kind, "message": problem.message}
        for path, problem in sorted(found.problems, key=lambda pair: (str(pair[0]), pair[1].line))
    ]
    cli.emit({"checked": found.checked, "fixed": fixed, "problems": problems}, args.json, lines(found, fixed, problems))
    if not found.checked:
        cli.say("check_citations.py: no hardware value was found, so nothing was checked; Step 0 writes them")
    return 0 if found.checked and not problems else 1


def audited(args) -> audit.Audit:
    if len(args.path) == 1 and args.path[0].is_dir():
        if args.platform or args.gpu_wiki:
            raise UsageError("a workspace names its own platform and wiki; leave out --platform and --gpu-wiki")
        return audit.of_workspace(Workspace(args.path[0]))
    for path in args.path:
        if not path.is_file():
            raise UsageError(f"{path} is not a file; pass one workspace, or files")
    return audit.of_files(args.path, wiki.root(args.gpu_wiki), args.platform)


def lines(found: audit.Audit, fixed: int, problems: list[dict]) -> list[str]:
    text = [f"{p['file']}:{p['line']}: {p['kind']}: {p['message']}" for p in problems]
    return [*text, f"{found.checked} values checked, {fixed} lines put right, {len(problems)} problems"]


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument("path", type=Path, nargs="+", metavar="WORKSPACE|FILE", help="a workspace, or text files")
    parser.add_argument("--fix", action="store_true", help="put the right line number where a row has moved")
    parser.add_argument("--platform", type=cli.filled, help="with files outside a workspace: the GPU they are about")
    parser.add_argument("--gpu-wiki", type=Path, help="with such files: another wiki than the bundle's own")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
