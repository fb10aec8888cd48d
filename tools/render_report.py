#!/usr/bin/env python3
"""A workspace as one HTML file: the task, the result, plots, every round with its evidence, and the open points.

The file needs nothing but itself: no network, no script. Values come from records; missing ones are named."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli
from kernelopt.errors import UsageError
from kernelopt.report import gather, session_page
from kernelopt.session.workspace import Workspace

EXAMPLES = """examples:
  render_report.py W
  render_report.py W --out softmax.html
  render_report.py W --markdown"""


def main() -> int:
    args = arguments()
    if args.out and args.out.is_dir():
        raise UsageError(f"--out {args.out} is a folder; name a file")
    workspace = Workspace(args.workspace)
    path = args.out or workspace.root / "report.html"
    if args.out and not is_report(path):
        raise UsageError(f"--out {path} is a file of something else; name another, or remove it")
    session = gather.gather(workspace)
    page = session_page.page(session, has_lessons=path.with_name(gather.LESSONS).is_file())
    for gap in session.gaps:
        cli.say(f"render_report.py: left out: {gap}")
    if args.markdown and args.out is None:
        print(page.markdown(), end="")
        return 0
    bundle.write_text(path, page.markdown() if args.markdown else page.html())
    cli.emit({"report": str(path), **session_page.summary(session).to_json()}, args.json, [str(path)])
    return 0


def is_report(path: Path) -> bool:
    """May this file be replaced: it does not exist yet, or it looks like one of our pages?"""
    if not path.exists():
        return True
    start = path.read_bytes()[:1000].decode("utf-8", "replace")
    return start.startswith("<!doctype html>") or (start.startswith("# ") and "\n## Summary\n" in start)


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("workspace", type=Path, metavar="WORKSPACE")
    parser.add_argument("--out", type=cli.path, metavar="FILE", help="where the page goes (default W/report.html)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--markdown", action="store_true", help="the same as Markdown, without plots; to stdout, or --out"
    )
    cli.add_json(form)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
