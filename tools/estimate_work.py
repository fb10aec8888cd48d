#!/usr/bin/env python3
"""The least work of a problem, per workload: FLOPs by torch's own counter, bytes of what goes in and comes out.

The counter knows matrix products, convolutions and attention; element-wise and reduction arithmetic counts 0.
The dtype of the work is that of the products' operands: an fp8 product with bf16 output is fp8 work.
With --workspace the result is written into the README's Task block. --flops, --bytes and --work-dtype give it by hand
where the count is wrong for an algorithm, for example when not all input is needed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.errors import UsageError
from kernelopt.hardware import roofline
from kernelopt.measure import least_work
from kernelopt.session import target
from kernelopt.session.workspace import Workspace, dtype_name


def main() -> int:
    args = arguments()
    what = chosen(args)
    found = least_work.counted_work(what.reference, what.dtype, what.cache, args.timeout)
    by_hand = {"dtype": args.work_dtype, "source": "given"} if args.work_dtype else {"source": "counted"}
    workloads = {name: {**work, **by_hand} for name, work in found.items()}
    if args.flops is not None or args.bytes is not None:
        workloads["default"] = given(workloads["default"], args)
    if what.workspace:
        record(what.workspace, workloads)
    cli.emit({"workloads": workloads}, args.json, [line(name, work) for name, work in workloads.items()])
    return 0


def chosen(args) -> target.Subject:
    if args.workspace:
        if args.reference or args.dtype:
            raise UsageError("--workspace says everything; leave out --reference and --dtype")
        return target.of_workspace(Workspace(args.workspace))
    if not args.reference:
        raise UsageError("pass --workspace W or --reference FILE")
    if not args.reference.is_file():
        raise UsageError(f"{args.reference} is not a file")
    return target.Subject(args.reference, args.reference, dtype_name(args.dtype) if args.dtype else None)


def given(work: dict, args) -> dict:
    """The counted work with figures of the caller's in place."""
    flops = work["flops"] if args.flops is None else args.flops
    if args.bytes is None:
        return {**work, "flops": flops, "source": "given"}
    return {**work, "flops": flops, "bytes_min": args.bytes, "bytes_in": None, "bytes_out": None, "source": "given"}


def record(workspace: Workspace, workloads: dict) -> None:
    task = workspace.task()
    task["shapes"] = {name: shape_text(work["shapes"]) for name, work in workloads.items()}
    before = task["work"]
    task["work"] = {name: {k: v for k, v in work.items() if k != "shapes"} for name, work in workloads.items()}
    sections = {}
    if task["work"] != before and task["targets"]:
        task["targets"] = []
        sections = dict.fromkeys(("Roofline", "Stop Conditions"), "TBD: the work has changed; set the targets again.")
        cli.say("estimate_work.py: the work has changed, the targets are gone: compute_utilization.py --set-targets")
    workspace.update_readme(task, sections)


def shape_text(shapes: dict) -> str:
    """ "64x1000, 1000 -> 64x1000" """
    sides = [
        ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[side]) for side in ("inputs", "outputs")
    ]
    return " -> ".join(sides)


def line(name: str, work: dict) -> str:
    return (
        f"{name}: {work['flops']} FLOP, at least {work['bytes_min']} bytes ({work['source']}), "
        f"{work['dtype']}, {shape_text(work['shapes'])}"
    )


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument("--workspace", type=Path, help="a workspace made by reference/workspace_init.sh")
    parser.add_argument("--reference", type=Path, help="instead of a workspace: file with Model and get_inputs")
    parser.add_argument(
        "--dtype", type=cli.filled, help="with --reference: cast floating inputs to bf16, fp16, fp32 or fp64"
    )
    parser.add_argument(
        "--work-dtype", choices=sorted(roofline.COMPUTE_ROWS), help="dtype of the arithmetic, given by hand"
    )
    parser.add_argument("--flops", type=cli.positive_int, help="FLOPs of the default workload, given by hand")
    parser.add_argument("--bytes", type=cli.positive_int, help="least bytes of the default workload, given by hand")
    parser.add_argument("--timeout", type=cli.positive_float, default=300, help="seconds (default 300)")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
