#!/usr/bin/env python3
"""Cut a problem out of a model: a module, or a chain of its operators, as a reference.py that a session starts from.

MODEL.py is your own file: load() returns a torch.nn.Module, inputs() its arguments (a list, or a dict of keywords);
workloads() may return a dict of names to more such functions. The operators, sizes, strides and dtypes are those of a
real run. The cut is proved: with it in place of the original, the model's outputs are equal. Sizes that may differ
become keywords of get_inputs, what is written in place becomes MUTATES. Numbers are random, with the mean, deviation
and range of the real ones; --keep-weights and --keep-inputs keep the real ones too.
Exit 1 when the part cannot be cut out; the message says why."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import UsageError
from kernelopt.models import cutting, finding, hugging_face


def main() -> int:
    args = arguments()
    hugging_face.check_file(args.model)
    part = part_of(args)
    files = None if args.operators else cutting.Files(args.out, args.keep_weights, args.keep_inputs)
    if files:
        files.check()
    with Sandbox(args.device, None, args.sandbox) as sandbox:
        if files is None:
            listed = cutting.operators(sandbox, part, args.timeout)
            cli.emit({"operators": listed}, args.json, [cutting.operator_line(one) for one in listed])
            return 0
        cli.say(f"cutting {part.module or 'the model'} out of {args.model} on {sandbox.device_name}")
        problem = cutting.cut(sandbox, part, files, args.timeout)
    cli.emit(problem.to_json(), args.json, cutting.lines(problem))
    cli.say(f"next: bash reference/workspace_init.sh NAME {args.out} --platform …")
    return 0


def part_of(args) -> cutting.Part:
    between = args.between and tuple(args.between)
    if args.group is None:
        return cutting.Part(args.model, args.module, between, args.workload, {}, args.call)
    if args.module or not args.groups:
        raise UsageError("--group N goes with --groups FILE, without --module")
    return replace(cutting.part_of_group(args.model, finding.listed(args.groups), args.group, between), call=args.call)


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument("model", type=cli.path, metavar="MODEL.py", help="has load() and inputs() or workloads()")
    parser.add_argument("--module", default="", metavar="PATH", help="such as layers.3.mlp (default: the whole model)")
    parser.add_argument(
        "--between", nargs=2, metavar=("A", "B"), help="only its operators from A to B, as they ran; see --operators"
    )
    parser.add_argument(
        "--group", type=cli.positive_int, metavar="N", help="a group of find_kernels.py; its promise too"
    )
    parser.add_argument(
        "--groups", type=cli.path, metavar="FILE", help="with --group: what find_kernels.py --save or --json gave"
    )
    parser.add_argument("--operators", action="store_true", help="list the module's operators and cut nothing")
    parser.add_argument("--workload", type=cli.filled, metavar="NAME", help="which of the model's (default: its first)")
    parser.add_argument(
        "--call", type=cli.positive_int, default=1, metavar="N", help="which call of the module in a step (default 1)"
    )
    parser.add_argument("--out", type=cli.path, metavar="FILE", help="where reference.py goes")
    parser.add_argument("--keep-weights", type=cli.path, metavar="FILE", help="keep the real parameters in this file")
    parser.add_argument("--keep-inputs", type=cli.path, metavar="FILE", help="keep real inputs, as more workloads")
    cli.add_run(parser, timeout_s=600)
    args = parser.parse_args()
    if not args.operators and not args.out:
        parser.error("pass --out FILE, where reference.py goes, or --operators")
    return args


if __name__ == "__main__":
    cli.run(main)
