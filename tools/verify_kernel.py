#!/usr/bin/env python3
"""Is the kernel right? Candidate and reference run in separate processes; one status, exit 0 only for OK.

Statuses: OK, COMPILE_ERROR, IMPORT_ERROR, LAUNCH_ERROR, RUNTIME_ERROR, ILLEGAL_ACCESS, TIMEOUT, OOM, WRONG_SHAPE,
WRONG_DTYPE, WRONG_STRIDE, WRONG_DEVICE, WRONG_VALUES, NONFINITE, OUT_OF_BOUNDS, INPUT_MUTATED, ALIASED_OUTPUT,
CHEAT_SUSPECT, INVALID_REFERENCE, INVALID_TASK."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device.sandbox import Sandbox
from kernelopt.measure import verify
from kernelopt.session.target import resolve
from kernelopt.statuses import Status

QUICK = "a quick check: no other sizes, layouts and values were tried"


def main() -> int:
    args = arguments()
    given = resolve(args)
    target = replace(
        given,
        tolerance=args.tolerance or given.tolerance,
        libraries=args.allow_libraries or given.libraries,
        only_these_shapes=args.quick or args.only_these_shapes or given.only_these_shapes,
    )
    seeds = 2 if args.quick else args.seeds
    with Sandbox(args.device, target.cache, args.sandbox) as sandbox:
        cli.say(f"verifying {target.kernel} on {sandbox.device_name}")
        result = verify.verify(sandbox, target, args.workload, seeds, args.sanitize, args.timeout, cli.say)
    if args.quick:
        result = replace(result, summary=f"{result.summary}; {QUICK}")
    cli.emit(result.to_json(), args.json, [result.summary])
    if result.status == Status.TIMEOUT:
        return 4
    return 0 if result.status == Status.OK else 1


def arguments():
    parser = cli.parser(__doc__)
    cli.add_subject(parser)
    cli.add_device(parser)
    parser.add_argument("--workload", nargs="+", help="only these workloads (default: all)")
    parser.add_argument(
        "--seeds",
        type=cli.positive_int,
        default=3,
        help="input sets per workload, at least 2, the last third secret (default 3)",
    )
    parser.add_argument(
        "--tolerance", type=cli.tolerance, metavar="X", help="bound on |error| / (|reference| + rms); default by dtype"
    )
    parser.add_argument("--allow-libraries", action="store_true", help="torch or cuBLAS may do the core work")
    parser.add_argument("--only-these-shapes", action="store_true", help="try no other sizes and layouts")
    parser.add_argument("--quick", action="store_true", help="the task's own inputs, two seeds; no gate accepts it")
    parser.add_argument("--sanitize", action="store_true", help="run compute-sanitizer as well")
    cli.add_sandbox(parser)
    parser.add_argument("--timeout", type=cli.positive_float, default=300, help="seconds per process (default 300)")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
