#!/usr/bin/env python3
"""Is the kernel right? Candidate and reference run in separate processes; one status, exit 0 only for OK.

--compile-only compiles it for the GPU that is here, or for --card, and checks nothing: exit 0 when it compiles.
Statuses: OK, COMPILE_ERROR, IMPORT_ERROR, LAUNCH_ERROR, RUNTIME_ERROR, ILLEGAL_ACCESS, TIMEOUT, OOM, WRONG_SHAPE,
WRONG_DTYPE, WRONG_STRIDE, WRONG_DEVICE, WRONG_VALUES, NONFINITE, OUT_OF_BOUNDS, INPUT_MUTATED, ALIASED_OUTPUT,
CHEAT_SUSPECT, INVALID_REFERENCE, INVALID_TASK, NOT_INTERPRETABLE (exit 3)."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.compiling import choosing, compiler, table
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import EnvironmentLacks, TimedOut
from kernelopt.measure import verify
from kernelopt.session.subject import KernelUnderTest, resolve
from kernelopt.statuses import Status

QUICK = "a quick check: no other sizes, layouts and values were tried"


def main() -> int:
    args = arguments()
    given = resolve(args)
    if args.compile_only:
        return compile_only(args, given)
    subject = replace(
        given,
        tolerance=args.tolerance or given.tolerance,
        libraries=args.allow_libraries or given.libraries,
        only_these_shapes=args.quick or args.only_these_shapes or given.only_these_shapes,
    )
    seeds = 2 if args.quick else args.seeds
    with Sandbox(args.device, subject.cache, args.sandbox) as sandbox:
        cli.say(f"verifying {subject.kernel} on {sandbox.device_name}")
        result = verify.verify(sandbox, subject, args.workload, seeds, args.sanitize, args.timeout, cli.say)
    if args.quick:
        result = replace(result, summary=f"{result.summary}; {QUICK}")
    cli.emit(result.to_json(), args.json, [result.summary])
    if result.status == Status.TIMEOUT:
        return 4
    if result.status == Status.NOT_INTERPRETABLE:
        return EnvironmentLacks.exit_code
    return 0 if result.status == Status.OK else 1


def compile_only(args, kernel: KernelUnderTest) -> int:
    """Compile the kernel, print its resources or the compiler's errors, and return the exit code."""
    if args.card:
        target = choosing.of_name(args.card, kernel.workspace)
    else:
        target = choosing.default(kernel.workspace, args.device == "cuda", "--card")
    cli.say(f"compiling {kernel.kernel} for {target.arch}")
    workload, limits = (args.workload or ["default"])[0], compiler.Limits.of(args.timeout)
    with Sandbox("cpu-interpreter", None, args.sandbox) as sandbox:
        (compiled,) = compiler.compile_target(sandbox, kernel, workload, [target], limits)
    if compiled.lacking and not compiled.refused:
        raise EnvironmentLacks(compiled.lacking)
    cli.emit(compiled.to_json(), args.json, table.lines([compiled]))
    if compiled.status == Status.TIMEOUT:
        return TimedOut.exit_code
    return 0 if compiled.status == Status.OK else 1


def arguments():
    parser = cli.parser(__doc__)
    cli.add_subject(parser)
    cli.add_device(parser)
    parser.add_argument("--workload", nargs="+", metavar="NAME", help="only these workloads (default: all)")
    parser.add_argument(
        "--seeds",
        type=cli.positive_int,
        default=3,
        metavar="N",
        help="input sets per workload, at least 2, the last third secret (default 3)",
    )
    parser.add_argument(
        "--tolerance", type=cli.tolerance, metavar="X", help="most |error| / (|reference| + scale); default by dtype"
    )
    parser.add_argument("--allow-libraries", action="store_true", help="torch or cuBLAS may do the core work")
    parser.add_argument("--only-these-shapes", action="store_true", help="try no other sizes and layouts")
    parser.add_argument("--quick", action="store_true", help="the task's own inputs, two seeds; no gate accepts it")
    parser.add_argument("--compile-only", action="store_true", help="compile it and check nothing")
    parser.add_argument(
        "--card", type=cli.filled, help="with --compile-only: for this card or architecture, such as gfx942"
    )
    parser.add_argument("--sanitize", action="store_true", help="run compute-sanitizer as well")
    cli.add_sandbox(parser)
    cli.add_timeout(parser, 300)
    cli.add_json(parser)
    args = parser.parse_args()
    if args.card and not args.compile_only:
        parser.error("--card goes with --compile-only")
    return args


if __name__ == "__main__":
    cli.run(main)
