#!/usr/bin/env python3
"""Roofline of a whole problem: rates, shares of the peaks, floor time, each hardware value cited from the wiki.

With --set-targets (Step 0) the workspace's Stop Conditions are computed and written into its README: 90 % (--share) of
the attainable rate, measured maximum preferred. A share of the floor of 100 is the floor itself."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.errors import Refused, UsageError
from kernelopt.gate import acceptance
from kernelopt.hardware import roofline, wiki
from kernelopt.hardware.work import ABSENT, Work
from kernelopt.session import platforms, roofline_section, stop_conditions, target_setting
from kernelopt.session.record_store import RecordStore
from kernelopt.session.task import Task
from kernelopt.session.workspace import Workspace
from kernelopt.statuses import Status

UNCAST = "as the reference makes it"
EXAMPLES = """examples:
  compute_utilization.py --workspace W --set-targets --share 95
  compute_utilization.py --workspace W --version v1
  compute_utilization.py --platform H200 --dtype bf16 --time-us 210 --flops 137438953472 --bytes 100663296"""


def main() -> int:
    args = arguments()
    if args.workspace is None:
        return explicit(args)
    if explicit_values(args) or bool(args.version) == args.set_targets:
        raise UsageError("with --workspace pass either --version vN or --set-targets, and nothing else")
    if args.share and not args.set_targets:
        raise UsageError("--share goes with --set-targets")
    workspace = Workspace(args.workspace)
    return set_targets(workspace, args) if args.set_targets else of_version(workspace, args)


def explicit_values(args) -> list:
    values = (args.platform, args.dtype, args.time_us, args.flops, args.bytes)
    return [value for value in values if value is not None]


def explicit(args) -> int:
    if len(explicit_values(args)) != 5:
        raise UsageError("pass --workspace W, or all of --platform, --dtype, --time-us, --flops and --bytes")
    page = wiki.product(args.platform, args.gpu_wiki)
    work = Work(flops=args.flops, bytes_in=None, bytes_out=None, bytes_min=args.bytes, dtype=args.dtype, source="given")
    return report(page, work, args.time_us, args.json)


def of_version(workspace: Workspace, args) -> int:
    record = RecordStore(workspace).recall(args.version)
    if record.latency_us is None:
        raise Refused(
            f"{args.version} has no recorded latency; pass a version that has one in: memory_manager.py summary "
            f"--workspace {workspace.root}"
        )
    task = workspace.task()
    work = known_work(task)[record.performance.workload]
    return report(product(workspace, task, args), work, record.latency_us, args.json, record.passed)


def report(page: wiki.Page, work: Work, time_us: float, as_json: bool, judged: bool = False) -> int:
    """judged: the gate has found the time possible, by the card's own clocks, which are unknown here."""
    roof = roofline.roof_for(page, work)
    utilization = roofline.utilization(time_us, work.flops, work.bytes_min, roof)
    if judged:
        utilization = replace(utilization, below_physical_limit=False)
    result = utilization.to_json() | {"platform": page.platform, "dtype": work.dtype, "citations": roof.citations()}
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in result.items()}
    lines = [f"{name}: {value}" for name, value in shown.items() if name != "citations"] + roof.citations()
    cli.emit(result, as_json, lines)
    if beyond := roofline.beyond_floor(utilization):
        cli.say(f"compute_utilization.py: {beyond}")
    if utilization.below_physical_limit:
        message = acceptance.impossible(utilization.time_us, utilization.limit_us)
        cli.say(f"compute_utilization.py: {Status.IMPOSSIBLE_TIME}: {message}")
        return 1
    return 0


def product(workspace: Workspace, task: Task, args) -> wiki.Page:
    if task.platform is None:
        raise UsageError(
            "the Task block names no platform; write a name of gpu_specs.py list there, or for a card that the wiki "
            f"lacks run: calibrate_gpu.py --workspace {workspace.root}"
        )
    return platforms.of_task(workspace, task, args.gpu_wiki)


def known_work(task: Task) -> dict[str, Work]:
    """The work of each workload; UsageError when it does not fit the task."""
    if task.work is None:
        raise UsageError("the Task block has no work yet; run: estimate_work.py --workspace W")
    main = task.work["default"]
    if main.bytes_min == 0:
        raise UsageError("the default workload moves no byte: get_inputs of the reference makes empty tensors")
    if main.cast_to not in (ABSENT, task.dtype):
        raise UsageError(
            f"the task's dtype was {main.cast_to or UNCAST} when the work was counted and is {task.dtype or UNCAST} "
            "now; run: estimate_work.py --workspace W"
        )
    return task.work


def set_targets(workspace: Workspace, args) -> int:
    task = workspace.task()
    page = product(workspace, task, args)
    roofs = roofline_section.roofs_of(known_work(task), page)
    share_pct = args.share or roofline.TARGET_SHARE_PCT
    target = target_setting.of_roof("default", task.work["default"], roofs["default"], share_pct)
    sections = roofline_section.sections(task.work, roofs)
    targets = target_setting.set_target(workspace, target, sections)
    if stop_conditions.is_library_rate(target):
        cli.say(
            f"compute_utilization.py: the target rests on {roofline.LIBRARY_RATE}, and more may be possible; "
            f"measure the floor: measure_ceiling.py --workspace {workspace.root} --set-targets"
        )
    if stop_conditions.is_documented(target):
        cli.say(
            "compute_utilization.py: the target rests on documented peaks and may be out of reach; first measure this "
            f"card (about a minute): calibrate_gpu.py --workspace {workspace.root}"
        )
    if target.metric == "bandwidth_gbps" and roofline.fits_in_cache(task.work["default"].bytes_min, roofs["default"]):
        cli.say(
            "compute_utilization.py: the bytes fit in the L2, so the target may be out of reach; one that can be met: "
            f"python tools/measure_ceiling.py --workspace {workspace.root} --set-targets"
        )
    result = {"targets": [each.to_json() for each in targets], "citations": roofline_section.citations(roofs)}
    lines = [sections["Roofline"], *map(stop_conditions.stop_line, targets)]
    if without := [name for name in task.work if name not in {each.workload for each in targets}]:
        lines.append(f"{', '.join(without)}: no target; the Stop Conditions are of the default workload")
    cli.emit(result, args.json, lines)
    return 0


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    cli.add_workspace(parser)
    parser.add_argument("--version", help="with --workspace: judge the recorded latency of this version")
    cli.add_set_targets(parser, "with --workspace: write roofline and Stop Conditions")
    parser.add_argument(
        "--share", type=cli.percentage, help="with --set-targets: percent of the attainable rate (default 90)"
    )
    parser.add_argument("--platform", help="target GPU as the wiki names it")
    parser.add_argument("--dtype", choices=sorted(roofline.COMPUTE_ROWS), help="of the arithmetic; int: none")
    parser.add_argument("--time-us", type=cli.positive_float, help="measured time, microseconds")
    parser.add_argument("--flops", type=cli.natural, help="FLOPs of the whole problem")
    parser.add_argument("--bytes", type=cli.positive_int, help="least bytes of the whole problem")
    parser.add_argument(
        "--gpu-wiki", type=Path, help="another wiki; default the workspace's, $GPU_WIKI or the bundle's own"
    )
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
