#!/usr/bin/env python3
"""Make a reference.py of a task that another project states: a FlashInfer-Bench definition with its workloads, a
SOL-ExecBench problem, a GPU MODE task, a KernelBench or KernelBench-Hard problem.

SOURCE is the definition's or problem's file, or the task's folder. Sizes become keyword sizes, tolerances COMPARE,
outputs that are written in place MUTATES. The tool prints what cannot be carried over, a line each,
and writes it into the file. The source's code runs in the sandbox alone, on its smallest workload: on the CPU where
there is no GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli
from kernelopt.device import gpu
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import UsageError
from kernelopt.formats import detecting, importing
from kernelopt.formats.tasks import Options


def main() -> int:
    args = arguments()
    refuse_place(args)
    options = Options(args.workloads, args.blobs, args.default, args.most)
    task = detecting.read_task(args.source, args.format, options)
    with Sandbox(args.device or gpu.device_here(), None, args.sandbox) as sandbox:
        cli.say(f"running the code of {args.source} on {sandbox.device_name}")
        made = importing.imported(task, sandbox, args.timeout)
    bundle.write_text(args.out, made.text)
    first, *lines = made.lines()
    cli.emit({"reference": str(args.out), **made.to_json()}, args.json, [f"{args.out}: {first}", *lines])
    if made.unchecked:
        cli.say(f"import_task.py: {args.out} is written, and did not run here: {made.unchecked}")
        return made.unchecked.exit_code
    return 0


def refuse_place(args) -> None:
    """UsageError where the result may not be written."""
    if args.out.is_dir():
        raise UsageError(f"--out: {args.out} is a folder; name a file")
    if args.out.exists() and not args.force:
        raise UsageError(f"{args.out} exists; --force replaces it, --out names another file")


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument(
        "source", metavar="SOURCE", type=cli.path, help="a definition's or problem's file, or a task's folder"
    )
    parser.add_argument("--format", choices=detecting.FORMATS, help="default: recognised by the files and their keys")
    parser.add_argument(
        "--workloads", type=cli.path, metavar="FILE", help="a definition's workloads (default: beside it)"
    )
    parser.add_argument(
        "--blobs", type=cli.path, metavar="DIR", help="the folder from which paths of stored tensors count"
    )
    parser.add_argument(
        "--default", type=cli.filled, metavar="NAME", help="the workload that a kernel must be faster on"
    )
    parser.add_argument(
        "--most", type=cli.positive_int, metavar="N", help="take at most so many workloads, spread over sizes"
    )
    parser.add_argument(
        "--out", type=cli.path, default=Path("reference.py"), metavar="FILE", help="default ./reference.py"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE")
    parser.add_argument(
        "--device", choices=["cuda", "cpu-interpreter"], help="where its code runs (default: cuda where there is a GPU)"
    )
    cli.add_sandbox(parser)
    cli.add_timeout(parser, 60, "for each run")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
