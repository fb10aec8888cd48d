#!/usr/bin/env python3
"""The least work of a problem, per workload: FLOPs by torch's own counter, bytes of the inputs and outputs.

The counter knows matrix products, convolutions and attention; element-wise and reduction arithmetic counts 0.
What a mask spares in attention is taken off, unless the inputs' values decide the mask (docs/limits.md).
The dtype of the work is that of the products' operands: an fp8 product with bf16 output is fp8 work.
With --workspace the result is written into the README's Task block. --flops, --bytes and --work-dtype give it by hand
where the count is wrong for an algorithm, for example when not all input is needed."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.hardware import roofline
from kernelopt.hardware.work import COUNTED, CountedWorkload, Work
from kernelopt.measure import least_work
from kernelopt.session.subject import of_reference
from kernelopt.session.task import Task
from kernelopt.session.workspace import Workspace


def main() -> int:
    args = arguments()
    subject = of_reference(args)
    counted = least_work.counted_work(subject.reference, subject.dtype, subject.cache, args.timeout)
    workloads = {name: replace(each, work=by_hand(name, each.work, args)) for name, each in counted.items()}
    if subject.workspace:
        record(subject.workspace, workloads)
    result = {name: {**each.work.to_json(), "shapes": each.shapes} for name, each in workloads.items()}
    cli.emit({"workloads": result}, args.json, [line(name, each) for name, each in workloads.items()])
    return 0


def by_hand(workload: str, work: Work, args) -> Work:
    """The counted work with the caller's figures in place: a dtype for every workload, FLOPs and bytes for the
    default one."""
    return work.given(args.work_dtype, *((args.flops, args.bytes) if workload == "default" else ()))


def record(workspace: Workspace, workloads: dict[str, CountedWorkload]) -> None:
    """Write shapes and work into the Task block; remove targets that were computed from other work."""
    before = workspace.task()
    shapes = {name: shape_text(each.shapes) for name, each in workloads.items()}
    task = replace(
        before, shapes=shapes, work={name: kept(each.work, before, name) for name, each in workloads.items()}
    )
    sections = {}
    if task.work != before.work and task.targets:
        task = replace(task, targets=())
        sections = dict.fromkeys(("Roofline", "Stop Conditions"), "TBD: the work has changed; set the targets again.")
        cli.say("estimate_work.py: the work has changed, the targets are gone: compute_utilization.py --set-targets")
    workspace.update_readme(task, sections)


def kept(counted: Work, before: Task, name: str) -> Work:
    """The work that the Task block has, where a new count is near to it, so that targets stay."""
    known = (before.work or {}).get(name)
    return known if known and counted.source == COUNTED and counted.is_near(known) else counted


def shape_text(shapes: dict) -> str:
    """ "64x1000, 1000 -> 64x1000" """
    sides = [
        ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[side]) for side in ("inputs", "outputs")
    ]
    return " -> ".join(sides)


def line(name: str, counted: CountedWorkload) -> str:
    work = counted.work
    text = (
        f"{name}: {work.flops} FLOP, at least {work.bytes_min} bytes ({work.source}), "
        f"{work.dtype}, {shape_text(counted.shapes)}"
    )
    if counted.spared_pct and work.source == COUNTED:
        spared = f"{counted.spared_pct:.3g} % of the products' FLOPs"
        text += f"; masks or symmetric results spare {spared}, which are not counted"
    if work.windowed_pct:
        share = f"{work.windowed_pct:.3g} % of the FLOPs are convolutions of stride 1"
        text += f"; {share}, which Winograd's form does with fewer: gpu-wiki/docs/optimization/winograd.md"
    if counted.drawn_flops and work.source == COUNTED:
        few, many = counted.drawn_flops
        text += (
            f"; drawn numbers decide the FLOPs: some draws have {few} to {many}, and this is their mean, so shares of"
        )
        text += " a rate are approximate"
    if counted.quantised:
        named = ", ".join(map(str, counted.quantised))
        text += f"; whole numbers of output {named} must be equal: COMPARE declares roundings that may fall either way"
    if counted.uncounted and work.source == COUNTED:
        text += f"; not counted: {counted.uncounted}; give the bytes with --bytes"
    return text


def arguments():
    parser = cli.parser(__doc__)
    cli.add_workspace(parser)
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="instead of a workspace: file with Model and get_inputs"
    )
    parser.add_argument(
        "--dtype", type=cli.filled, help="with --reference: cast floating inputs to bf16, fp16, fp32 or fp64"
    )
    cli.add_work(parser, roofline.COMPUTE_ROWS, "of the default workload")
    cli.add_timeout(parser, 300, "in all")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
