#!/usr/bin/env python3
"""What limits a profiled kernel, which metrics say so, and what to try. Needs no GPU.

PATH: a folder of profile_kernel.sh, its metrics.json, any .ncu-rep (whose whole report is taken as one call), a CSV of
Nsight Compute, or output of rocprofv3 (folder, CSV or .db; tested on samples, never on an AMD machine).
exit 1: nothing could be classified, or with --check-response the answer does not hold."""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.diagnosis import analysis, profile_folder, profile_pages, text
from kernelopt.diagnosis.diagnosis import Diagnosis
from kernelopt.errors import UsageError
from kernelopt.profilers.profile import Profile
from kernelopt.report import brief, brief_answer
from kernelopt.session import explorations
from kernelopt.session.record_store import RecordStore
from kernelopt.session.workspace import Workspace

EXAMPLES = """examples:
  analyze_profile.py W/profiles/v0/annotation
  analyze_profile.py report.ncu-rep --json
  analyze_profile.py W/profiles/v1/annotation --workspace W --brief > prompt.md
  analyze_profile.py W/profiles/v1/annotation --check-response answer.md"""


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace) if args.workspace else None
    profile = profile_folder.read(args.path, workspace)
    earlier = profile_folder.earlier(workspace, profile.params) if workspace and profile.params else []
    if workspace and profile.params and not profile_folder.is_of(workspace, profile.params):
        cli.say(
            f"analyze_profile.py: {args.path} is of another kernel than {workspace.root} has; is it another session's?"
        )
    diagnosis = analysis.diagnose(profile, earlier, args.platform)
    if args.check_response:
        return check_response(args, diagnosis)
    if args.brief:
        return write_brief(args, workspace, profile, diagnosis)
    if args.summary or args.devlog:
        return page(args, workspace, profile, diagnosis, earlier)
    diagnosis = replace(diagnosis, findings=diagnosis.findings[: args.findings])
    origin = text.origin(profile)
    around = workspace or profile_folder.workspace_of(args.path)
    little = around and explorations.little_came_of_the_last(around, RecordStore(around))
    cli.emit({"origin": origin, **diagnosis.to_json()}, args.json, [origin, *lines(diagnosis, little)])
    return 1 if diagnosis.classification.bottleneck == "unknown" else 0


def lines(diagnosis: Diagnosis, little: str | None) -> list[str]:
    """little: what to do where the last exploration brought next to nothing."""
    answer = [f"take care: {warning}" for warning in diagnosis.warnings]
    for kernel in diagnosis.kernels:
        share, duration = text.number(kernel.share_pct), text.number(kernel.duration_us)
        answer.append(f"{share:>5} %  {duration} us  {kernel.classification.bottleneck:14} {kernel.name}")
    answer.append(text.summary_line(diagnosis))
    if light := diagnosis.speed_of_light:
        answer.append(f"{'stop' if light.should_stop else 'go on'}: {light.reason}")
        answer += [little] if little and not light.should_stop else []
    for finding in diagnosis.findings:
        answer += text.finding_lines(finding)
    if rules := [rule for rule in diagnosis.second_opinion if rule.speedup_pct]:
        best = max(rules, key=lambda rule: rule.speedup_pct)
        message = textwrap.shorten(best.message, 300, placeholder=" …")
        answer.append(f"NVIDIA's rules, a second opinion: {best.name} ({best.speedup_pct:.0f} %): {message}")
    if diagnosis.missing_metrics:
        answer.append(f"not collected: {', '.join(diagnosis.missing_metrics)}")
    if diagnosis.not_on_architecture:
        answer.append(f"not on {diagnosis.architecture}: {', '.join(diagnosis.not_on_architecture)}")
    return answer


def page(args, workspace: Workspace | None, profile: Profile, diagnosis: Diagnosis, earlier: Sequence[Profile]) -> int:
    """The block for an orchestrating agent, or the entry for a development log."""
    if not profile.params:
        raise UsageError(
            f"{args.path} has no params.json beside it, which --summary and --devlog need; leave them out, or pass a "
            "folder that profile_kernel.sh made"
        )
    before = profile_folder.parent(workspace, earlier) if workspace else None
    if args.devlog:
        words = profile_pages.devlog(profile, diagnosis, before)
    else:
        words = "\n".join(profile_pages.summary(profile, diagnosis, before))
    cli.emit({"text": words}, args.json, [words])
    return 0


def write_brief(args, workspace: Workspace | None, profile: Profile, diagnosis: Diagnosis) -> int:
    """The two prompts, for any language model."""
    parts, left_out = brief.Parts(diagnosis, text.origin(profile)), []
    if workspace:
        parts, left_out = brief.of_workspace(workspace, profile, diagnosis)
    for record in left_out:
        cli.say(f"analyze_profile.py: not in the brief: {record}")
    prompts = brief.compose(parts)
    cli.emit(prompts.to_json(), args.json, [prompts.system, "", prompts.user])
    return 0


def check_response(args, diagnosis: Diagnosis) -> int:
    try:
        answer = args.check_response.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{args.check_response} cannot be read: {error.strerror}") from None
    result = brief_answer.check_response(answer, diagnosis.metrics)
    cli.emit(result.to_json(), args.json, result.problems or ["the answer holds"])
    return 0 if result.valid else 1


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--findings", type=cli.positive_int, default=5, help="how many findings at most (default 5)")
    parser.add_argument("--workspace", type=Path, help="adds task, kernel, history and earlier profiles")
    parser.add_argument(
        "--platform", type=cli.filled, help="for rocprofv3 output: the product whose bandwidth is looked up"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--summary", action="store_true", help="the block for an orchestrating agent")
    output.add_argument("--devlog", action="store_true", help="the entry for a development log")
    output.add_argument("--brief", action="store_true", help="system and user prompt for a language model")
    output.add_argument("--check-response", type=Path, metavar="FILE", help="does a model's answer hold?")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
