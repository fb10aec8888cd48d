#!/usr/bin/env python3
"""What limits a profiled kernel, which counters say so, and what to try. Needs no GPU.

PATH: a folder of profile_kernel.sh, its metrics.json, any .ncu-rep (whose whole report is taken as one call), a CSV of Nsight Compute,
or output of rocprofv3 (folder, CSV or .db; AMD: the parser was tested on samples, nothing was run on AMD hardware).
exit 1: nothing could be classified, or with --check-response the answer does not hold."""

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.diagnosis import foreign_profile, profile_folder, profile_pages
from kernelopt.errors import UsageError
from kernelopt.report import brief
from kernelopt.session.workspace import Workspace

EXAMPLES = """examples:
  analyze_profile.py W/profiles/v0/annotation
  analyze_profile.py report.ncu-rep --json
  analyze_profile.py W/profiles/v1/annotation --workspace W --brief > prompt.md
  analyze_profile.py W/profiles/v1/annotation --check-response answer.md"""


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace) if args.workspace else None
    profile = foreign_profile.load(args.path, workspace)
    earlier = profile_folder.earlier(workspace, profile["params"]) if workspace and profile["params"] else []
    if workspace and profile["params"] and not profile_folder.is_of(workspace, profile["params"]):
        cli.say(
            f"analyze_profile.py: {args.path} is of another kernel than {workspace.root} has; is it another session's?"
        )
    found = foreign_profile.analysed(profile, earlier, args.platform)
    if args.check_response:
        return check_response(args, found)
    if args.brief:
        return write_brief(args, workspace, profile, found)
    if args.summary or args.devlog:
        return page(args, workspace, profile, found, earlier)
    found["findings"] = found["findings"][: args.findings]
    result = {"origin": profile.get("origin") or profile_folder.origin(profile["params"]), **found}
    cli.emit(result, args.json, lines(result))
    return 1 if found["classification"]["class"] == "unknown" else 0


def lines(result: dict) -> list[str]:
    text = [result["origin"], *(f"take care: {warning}" for warning in result["warnings"])]
    for kernel in result["kernels"]:
        share = profile_folder.number(kernel["share_pct"])
        text.append(
            f"{share:>5} %  {profile_folder.number(kernel['duration_us'])} us  {kernel['class']:14} {kernel['name']}"
        )
    text.append(profile_folder.summary_line(result))
    if light := result.get("speed_of_light"):
        text.append(f"{'stop' if light['should_stop'] else 'go on'}: {light['reason']}")
    for finding in result["findings"]:
        text += profile_folder.finding_lines(finding)
    if rules := [rule for rule in result["second_opinion"] if rule["speedup_pct"]]:
        best = max(rules, key=lambda rule: rule["speedup_pct"])
        text.append(
            f"NVIDIA's rules, a second opinion: {best['name']} ({best['speedup_pct']:.0f} %): {textwrap.shorten(best['message'], 300, placeholder=' …')}"
        )
    if result["missing_metrics"]:
        text.append(f"not collected: {', '.join(result['missing_metrics'])}")
    if result["not_on_architecture"]:
        text.append(f"not on {result['architecture']}: {', '.join(result['not_on_architecture'])}")
    return text


def page(args, workspace: Workspace | None, profile: dict, found: dict, earlier: list[dict]) -> int:
    """The block for an orchestrating agent, or the entry for a development log."""
    if not profile["params"]:
        raise UsageError(f"{args.path} has no params.json beside it, which --summary and --devlog need")
    before = profile_folder.parent(workspace, earlier) if workspace else None
    text = (
        profile_pages.devlog(profile, found, before)
        if args.devlog
        else "\n".join(profile_pages.summary(profile, found, before))
    )
    cli.emit({"text": text}, args.json, [text])
    return 0


def write_brief(args, workspace: Workspace | None, profile: dict, found: dict) -> int:
    """The two prompts, for any language model."""
    parts, left_out = brief.Parts(found, profile_folder.origin(profile["params"])), []
    if workspace:
        parts, left_out = brief.of_workspace(workspace, profile, found)
    for what in left_out:
        cli.say(f"analyze_profile.py: not in the brief: {what}")
    prompts = brief.compose(parts)
    cli.emit(prompts, args.json, [prompts["system"], "", prompts["user"]])
    return 0


def check_response(args, found: dict) -> int:
    try:
        text = args.check_response.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{args.check_response} cannot be read: {error.strerror}") from None
    result = brief.check_response(text, found["metrics"])
    cli.emit(result, args.json, result["problems"] or ["the answer holds"])
    return 0 if result["valid"] else 1


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--findings", type=cli.positive_int, default=5, help="how many findings at most (default 5)")
    parser.add_argument("--workspace", type=Path, help="adds task, kernel, history and earlier profiles")
    parser.add_argument(
        "--platform", type=cli.filled, help="of rocprofv3 output: the product, whose bandwidth is looked up"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--summary", action="store_true", help="the block for an orchestrating agent")
    what.add_argument("--devlog", action="store_true", help="the entry for a development log")
    what.add_argument("--brief", action="store_true", help="system and user prompt for a language model")
    what.add_argument("--check-response", type=Path, metavar="FILE", help="does a model's answer hold?")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
