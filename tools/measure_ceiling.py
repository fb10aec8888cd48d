#!/usr/bin/env python3
"""Measures the ceiling of a problem on this GPU: what bounds it, and nothing else.

Memory-bound: a kernel reads and writes the problem's bytes, with a cold cache. Compute-bound: the bare tensor
operations of the problem, on random data in shared memory: cold, burst and sustained, with the clock inside the kernel.
Cold and burst leave out the start of the launch: a floor may be too low, never too high. What else the problem must do,
per element of its result and block of k, runs in other warps: --per-k-block with --fp32-fma or --exp2 (an epilogue once
per element: the whole k is a block). In a workspace this becomes a row of W/calibration.md, and the floor of roofline,
gate and goal. A library's product is timed beside it: an opponent, no floor.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli
from kernelopt.device import gpu
from kernelopt.errors import UsageError
from kernelopt.hardware import roofline
from kernelopt.hardware.work import OtherArithmetic, Work
from kernelopt.measure import card_rates, tensor_rates
from kernelopt.session import ceiling_rows, platforms, record_store, roofline_section, stop_conditions, target_setting
from kernelopt.session.task import Target
from kernelopt.session.workspace import Workspace

EXAMPLES = """examples:
  measure_ceiling.py --workspace W --per-k-block 128 --fp32-fma 1     (an fp8 product with scales per 128 of k)
  measure_ceiling.py --flops 1099511627776 --dtype bf16"""
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int")


@dataclass(frozen=True)
class Asked:
    """What is measured. moved: (bytes in, bytes out), None for no bandwidth. flops: None for no tensor operations."""

    dtype: str
    moved: tuple[int, int] | None
    flops: int | None
    other: OtherArithmetic | None = None


def main() -> int:
    args = arguments(f"{__doc__}\n{EXAMPLES}")
    result, text = measured(args)
    cli.emit(result, args.json, text)
    return 0


def measured(args) -> tuple[dict, list[str]]:
    """(the JSON object, the same in words); what was measured of a workspace's problem is stored there."""
    asked = asked_for(args)
    if args.set_targets:
        check_target(args, asked)
    result, text = {"bandwidth": None, "tensor": None, "with_other_arithmetic": None, "library_rate": None}, []
    if asked.moved:
        result["bandwidth"], lines = bandwidth(asked, args)
        result["device"], text = result["bandwidth"]["device"], text + lines
    if asked.flops:
        tensor = tensor_rates.measure(asked.dtype, asked.flops, asked.other, args.timeout)
        result |= {"device": tensor.device.name, **tensor.to_json()}
        text += [line for one in tensor.ceilings for line in ceiling_rows.lines(one)]
        text.append(tensor_rates.library_line(tensor))
        if args.workspace:
            result["page"] = str(store(Workspace(args.workspace), asked, tensor))
    if args.set_targets:
        target = target_of(args, asked, result)
        target_setting.set_target(Workspace(args.workspace), target)
        result["target"] = target.to_json()
        text.append(stop_conditions.stop_line(target))
    elif asked.flops and args.workspace:
        text.append(f"now: compute_utilization.py --workspace {args.workspace} --set-targets")
    return result, text


def bandwidth(asked: Asked, args) -> tuple[dict, list[str]]:
    """(the report of a kernel that only moves the bytes, the same in words)"""
    read, written = asked.moved
    work = {"bytes_in": read, "bytes_out": written, "dtype": asked.dtype}
    device, ceiling = card_rates.run("ceiling", {**work, "rep_ms": args.rep_ms}, args.timeout)
    rate = ceiling.best.rate
    latency_us = (read + written) / rate.median / 1e3
    result = {"device": device, **ceiling.to_json(), "dtype": asked.dtype, "latency_us": latency_us}
    text = [
        f"{read} bytes read, {written} written, {asked.dtype}: {rate.describe('GB/s')}, "
        f"{latency_us:.2f} us, the best of {len(ceiling.rates)} shapes",
        *card_rates.state_lines(ceiling.gpu_state),
    ]
    return result, text


def asked_for(args) -> Asked:
    """What the workspace or the options ask for."""
    by_hand = (args.bytes_in, args.bytes_out, args.flops, args.dtype)
    if args.workspace:
        if any(value is not None for value in by_hand):
            raise UsageError("--workspace says everything; leave out --bytes-in, --bytes-out, --flops and --dtype")
        return of_workspace(args)
    moves = args.bytes_in is not None and args.bytes_out is not None
    if args.dtype is None or not (moves or args.flops) or (args.only == "bandwidth" and not moves):
        raise UsageError("pass --workspace W, or --dtype with --bytes-in and --bytes-out, or with --flops")
    flops = None if args.only == "bandwidth" else args.flops
    check_dtype(args.dtype, flops)
    return Asked(args.dtype, (args.bytes_in, args.bytes_out) if moves else None, flops, other_of(args))


def of_workspace(args) -> Asked:
    """The part of the problem that bounds it; both where that is not known."""
    workspace = Workspace(args.workspace)
    task = workspace.task()
    work = task.work_of(args.workload)
    if work is None:
        raise UsageError(f"the Task block has no work for {args.workload}; run: estimate_work.py --workspace W")
    kinds = {args.only} if args.only else kinds_of(work, platforms.roof_of_task(workspace, task))
    other = other_of(args) or work.other_arithmetic
    if kinds == {"bandwidth"}:
        return Asked(work.dtype, bytes_of(work), None)
    check_dtype(work.dtype, work.flops)
    return Asked(work.dtype, bytes_of(work) if "bandwidth" in kinds else None, work.flops, other)


def kinds_of(work: Work, roof: roofline.Roof | None) -> set[str]:
    if not work.flops or work.dtype not in tensor_rates.DTYPES:
        return {"bandwidth"}
    if roof is None:
        return {"bandwidth", "tensor"}
    return {"tensor" if roofline.bound(work.flops, work.bytes_min, roof).bound == "compute" else "bandwidth"}


def bytes_of(work: Work) -> tuple[int, int]:
    if work.bytes_in is None:
        raise UsageError("the work was given by hand, as one sum; pass --bytes-in, --bytes-out and --dtype instead")
    return work.bytes_in, work.bytes_out


def check_dtype(dtype: str, flops: int | None) -> None:
    if flops and dtype not in tensor_rates.DTYPES:
        known = ", ".join(tensor_rates.DTYPES)
        raise UsageError(
            f"there is no probe of tensor operations in {dtype} (there is one in {known}); the target of such a "
            f"problem stays {roofline.LIBRARY_RATE}"
        )


def other_of(args) -> OtherArithmetic | None:
    """The other arithmetic of the options."""
    if args.per_k_block is None:
        if args.fp32_fma or args.exp2:
            raise UsageError("--fp32-fma and --exp2 are counted per element and block of k; pass --per-k-block K too")
        return None
    if not (args.fp32_fma or args.exp2):
        raise UsageError("with --per-k-block pass --fp32-fma N or --exp2 N")
    return OtherArithmetic(k_block=args.per_k_block, fp32_fma=args.fp32_fma, exp2=args.exp2)


def check_target(args, asked: Asked) -> None:
    """Raises UsageError before the measurement: a target is the default workload's, on the GPU of the task, and of
    what bounds it."""
    if args.workspace is None or args.workload != "default":
        raise UsageError("--set-targets goes with --workspace and the default workload")
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
    if asked.flops is None and roof and roofline.bound(work.flops, work.bytes_min, roof).bound == "compute":
        raise UsageError(
            "this problem is compute-bound; its target: measure_ceiling.py --set-targets, without --only bandwidth; or "
            "compute_utilization.py --set-targets"
        )


def store(workspace: Workspace, asked: Asked, measured: tensor_rates.Measured) -> Path:
    """Write the rows into the workspace's calibration, which is made where it has none; its path."""
    task = workspace.task()
    platforms.check_platform(workspace, task, measured.device.name)
    target = workspace.root / platforms.CALIBRATION
    page = platforms.of_device(measured.device.name, workspace, task)
    before = platforms.unsealed_text(target) if task.calibration else ceiling_rows.new_page(page, measured.device)
    date = record_store.now()[:10]
    bundle.write_text(target, ceiling_rows.page_with(list(measured.ceilings), before, measured.device, date))
    work = {**task.work, "default": replace(task.work["default"], other_arithmetic=asked.other)}
    task = replace(task, calibration=platforms.CALIBRATION, work=work)
    workspace.update_readme(task, roofline_section.renewed(workspace, task))
    return target


def target_of(args, asked: Asked, result: dict) -> Target:
    """The Stop Condition: a share of the ceiling that bounds the problem."""
    if asked.flops is None:
        best = result["bandwidth"]["best"]["median"]
        return target_setting.of_ceiling(best, result["device"], args.share)
    workspace = Workspace(args.workspace)
    task = workspace.task()
    return target_setting.of_roof("default", task.work_of(), platforms.roof_of_task(workspace, task), args.share)


def arguments(description: str):
    parser = cli.parser(description)
    parser.add_argument("--workspace", type=Path, help="a workspace with its work counted")
    cli.add_workload(parser)
    parser.add_argument("--only", choices=["bandwidth", "tensor"], help="default: what bounds the problem")
    parser.add_argument("--bytes-in", type=cli.natural, help="instead of a workspace: bytes read")
    parser.add_argument("--bytes-out", type=cli.natural, help="bytes written")
    parser.add_argument("--flops", type=cli.positive_int, help="instead of a workspace: FLOPs of the tensor operations")
    parser.add_argument("--dtype", choices=DTYPES, help="of the elements, or of the operands")
    parser.add_argument("--per-k-block", type=cli.positive_int, help="k of a block, for --fp32-fma and --exp2")
    parser.add_argument("--fp32-fma", type=cli.natural, default=0, help="fp32 multiply-adds per element and block of k")
    parser.add_argument("--exp2", type=cli.natural, default=0, help="powers of two per element and block of k")
    cli.add_set_targets(parser, "write the Stop Condition into the workspace")
    parser.add_argument(
        "--share",
        type=cli.percentage,
        default=roofline.TARGET_SHARE_PCT,
        help="with --set-targets: percent of the ceiling (default 90)",
    )
    cli.add_benchmark_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
