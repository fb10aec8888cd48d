#!/usr/bin/env python3
"""Measures this GPU's memory on a problem's size: a kernel reads and writes the problem's bytes and does nothing else.

Bytes in, bytes out and dtype come from a workspace's work (estimate_work.py) or from options. Cache cold, as verify,
timing and the gate take it; GB/s counts bytes read and written. A small problem cannot reach the maximum of the wiki,
and one that mostly reads may pass it: --set-target makes the workspace's Stop Condition from this measurement.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device import gpu
from kernelopt.errors import UsageError
from kernelopt.hardware import roofline
from kernelopt.measure import card_rates
from kernelopt.session import platforms, stop_conditions, target_setting
from kernelopt.session.task import Target
from kernelopt.session.workspace import Workspace


def main() -> int:
    args = arguments()
    work = moved(args)
    if args.set_target:
        check_target(args)
    device, ceiling = card_rates.run("ceiling", {**vars(work), "rep_ms": args.rep_ms}, args.timeout)
    rate = ceiling.best.rate
    latency_us = (work.bytes_in + work.bytes_out) / rate.median / 1e3
    result = {"device": device, **ceiling.to_json(), "dtype": work.dtype, "latency_us": latency_us}
    text = [
        f"{work.bytes_in} bytes read, {work.bytes_out} written, {work.dtype}: {rate.describe('GB/s')}, "
        f"{latency_us:.2f} us, the best of {len(ceiling.rates)} shapes",
        *card_rates.state_lines(ceiling.gpu_state),
    ]
    if args.set_target:
        target = target_setting.of_ceiling(rate.median, device, args.share)
        set_target(Workspace(args.workspace), target)
        result["target"] = target.to_json()
        text.append(stop_conditions.stop_line(target))
    cli.emit(result, args.json, text)
    return 0


@dataclass(frozen=True)
class Moved:
    """The bytes that a problem reads and writes. dtype: of the elements."""

    bytes_in: int
    bytes_out: int
    dtype: str


def moved(args) -> Moved:
    """The bytes of the workload or of the options."""
    by_hand = (args.bytes_in, args.bytes_out, args.dtype)
    if args.workspace is None:
        if None in by_hand:
            raise UsageError("pass --workspace W, or all of --bytes-in, --bytes-out and --dtype")
        return Moved(*by_hand)
    if set(by_hand) != {None}:
        raise UsageError("--workspace says everything; leave out --bytes-in, --bytes-out and --dtype")
    work = Workspace(args.workspace).task().work_of(args.workload)
    if work is None:
        raise UsageError(f"the Task block has no work for {args.workload}; run: estimate_work.py --workspace W")
    if work.bytes_in is None:
        raise UsageError("the work was given by hand, as one sum; pass --bytes-in, --bytes-out and --dtype instead")
    return Moved(work.bytes_in, work.bytes_out, work.dtype)


def check_target(args) -> None:
    """Raises UsageError before the measurement: a target is the default workload's, on the GPU of the task, and
    memory-bound."""
    if args.workspace is None or args.workload != "default":
        raise UsageError("--set-target goes with --workspace and the default workload")
    workspace = Workspace(args.workspace)
    task = workspace.task()
    work = task.work_of()
    platforms.check_platform(workspace, task, gpu.identify().name)
    roof = platforms.roof_of_task(workspace, task)
    if roof is None and work.flops:
        raise UsageError(
            "this card has no roofline that says whether memory or arithmetic bounds the problem; "
            "first: calibrate_gpu.py --workspace W"
        )
    if roof and roofline.bound(work.flops, work.bytes_min, roof).bound == "compute":
        raise UsageError("this problem is compute-bound; its target: compute_utilization.py --set-targets")


def set_target(workspace: Workspace, target: Target) -> None:
    """Replace the target of that workload and metric; others stay."""
    task = workspace.task()
    others = [old for old in task.targets if (old.workload, old.metric) != (target.workload, target.metric)]
    targets = (target, *others)
    sections = {"Stop Conditions": "\n".join(map(stop_conditions.stop_line, targets))}
    workspace.update_readme(replace(task, targets=targets), sections)


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument("--workspace", type=Path, help="a workspace with its work counted")
    parser.add_argument("--workload", default="default", help="which workload (default: the one of get_inputs)")
    parser.add_argument("--bytes-in", type=cli.natural, help="instead of a workspace: bytes read")
    parser.add_argument("--bytes-out", type=cli.natural, help="bytes written")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32", "fp64", "int"], help="of the elements")
    parser.add_argument("--set-target", action="store_true", help="write the Stop Condition into the workspace")
    parser.add_argument(
        "--share",
        type=cli.percentage,
        default=roofline.TARGET_SHARE_PCT,
        help="with --set-target: percent of the ceiling (default 90)",
    )
    cli.add_benchmark_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
