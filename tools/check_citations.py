#!/usr/bin/env python3
"""Is every hardware value a citation that holds? Audits a workspace's README, plans, reports, records, notes and
kernels, or files.

Problems block the gate:
  a citation that does not hold, in any file
  a plan with a TBD, or with a row of an exploration that is not there, is wrong, or has another time than the plan says
  a figure without a citation or measurement where values are used: Task block, Hardware Spec, Roofline, Stop
  Conditions, a plan's Evidence, baseline_report.md, a record's evidence
Hints do not. They name a figure elsewhere that equals a row of the platform's pages, and the citation to write or the
query to make. exit 0: something was checked, and there is no problem.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.audit import workspace_audit
from kernelopt.audit.citations import Problem
from kernelopt.errors import UsageError
from kernelopt.hardware import wiki
from kernelopt.session.record_store import RecordStore
from kernelopt.session.workspace import Workspace

Issue = tuple[Path, Problem]  # a file, and a problem, hint or fix in it


def main() -> int:
    args = arguments()
    audit = audited(args)
    fixed = workspace_audit.fix(audit) if args.fix else []
    parts = {"fixes": ordered(fixed), "problems": ordered(audit.problems), "hints": ordered(audit.hints)}
    result = {"checked": audit.checked, "fixed": len(fixed)}
    result |= {name: [to_json(*issue) for issue in issues] for name, issues in parts.items()}
    cli.emit(result, args.json, lines(audit.checked, parts))
    if not audit.checked:
        cli.say("check_citations.py: there is no hardware value, so nothing was checked; Step 0 writes them")
    return 0 if audit.checked and not audit.problems else 1


def audited(args) -> workspace_audit.Audit:
    if len(args.path) == 1 and args.path[0].is_dir():
        if args.platform or args.gpu_wiki:
            raise UsageError("a workspace names its own platform and wiki; leave out --platform and --gpu-wiki")
        workspace = Workspace(args.path[0])
        return workspace_audit.of_workspace(workspace, workspace.task(), RecordStore(workspace))
    for path in args.path:
        if not path.is_file():
            raise UsageError(f"{path} is not a file; pass one workspace, or files")
    return workspace_audit.of_files(args.path, wiki.root(args.gpu_wiki), args.platform)


def ordered(issues: list[Issue]) -> list[Issue]:
    """The issues by file and line."""
    return sorted(issues, key=lambda issue: (str(issue[0]), issue[1].line))


def to_json(path: Path, problem: Problem) -> dict:
    return {"file": str(path), "line": problem.line, "kind": problem.kind, "message": problem.message}


def lines(checked: int, parts: dict[str, list[Issue]]) -> list[str]:
    text = []
    for name, prefix in (("problems", ""), ("hints", "hint: "), ("fixes", "fixed: ")):
        text += [f"{path}:{one.line}: {prefix}{one.kind}: {one.message}" for path, one in parts[name]]
    counts = f"{len(parts['fixes'])} lines fixed, {len(parts['problems'])} problems, {len(parts['hints'])} hints"
    return [*text, f"{checked} values checked, {counts}"]


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument("path", type=Path, nargs="+", metavar="WORKSPACE|FILE", help="a workspace, or text files")
    parser.add_argument(
        "--fix",
        action="store_true",
        help="correct the line number of a row that has moved; in Markdown and text, add a citation behind a hint's "
        "figure that equals one row; code stays as it is",
    )
    parser.add_argument("--platform", type=cli.filled, help="with files outside a workspace: the GPU they are about")
    parser.add_argument("--gpu-wiki", type=Path, help="with such files: another wiki than the one in the bundle")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
