#!/usr/bin/env python3
"""Compile a kernel for any GPUs, none of which need be here: will this tile fit on that card?

Prints, for each kernel that a call launches and each target: registers, spills, stack, shared memory or LDS, tensor
instructions, access widths, code size, theoretical occupancy and its limiter. An autotuned kernel is compiled in all
its configurations, which are ranked by what fits. Nothing runs: all is "compiled for ... here, not run".
Where torch is not built for CUDA, the host code of a .cu file is not compiled, and nothing is linked.
Triton's wheel compiles Triton for sm_70 to sm_121 and gfx90a to gfx1250; nvcc compiles CUDA C++, hipcc does for AMD.
Exit 1 when a target refuses the kernel; the others are compiled nevertheless."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.compiling import choosing, compiler, findings, table
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import EnvironmentLacks, TimedOut
from kernelopt.session import compilations, digests, record_store
from kernelopt.session.subject import resolve
from kernelopt.statuses import Status

EXAMPLES = """examples:
  compile_kernel.py --kernel kernel.py --reference reference.py --for sm_90,sm_100,gfx942
  compile_kernel.py --workspace W --for mi300x,b200 --emit asm      the code goes to asm/gfx942 and asm/sm_100a"""


def main() -> int:
    args = arguments()
    kernel = resolve(args)
    if args.targets:
        targets = choosing.of_names(args.targets, kernel.workspace, "--for")
    else:
        targets = [choosing.default(kernel.workspace, kernel.workspace is None, "--for")]
    if args.emit:
        args.emit.mkdir(parents=True, exist_ok=True)  # before a minute of compiling, not after it
    cli.say(f"compiling {kernel.kernel} for {', '.join(target.arch for target in targets)}")
    with Sandbox("cpu-interpreter", None, args.sandbox) as sandbox:
        limits = compiler.Limits.of(args.timeout, args.configurations)
        results = compiler.compile_target(sandbox, kernel, args.workload, targets, limits)
        written = compiler.emit(results, args.emit) if args.emit else []
    answer = {"targets": [findings.to_json(one) for one in results], "written": [str(path) for path in written]}
    if kernel.workspace:
        digest = digests.digest(kernel.kernel)
        path = compilations.save(kernel.workspace, digest, record_store.now(), answer, table.brief_lines(results))
        cli.say(f"stored in {path}")
    cli.emit(answer, args.json, [*table.lines(results), *(f"wrote {path}" for path in written)])
    return exit_code(results)


def exit_code(results: list) -> int:
    """1 when a target refuses the kernel; else 4 when one took too long, 3 when a compiler is missing."""
    if all(one.status == Status.OK for one in results):
        return 0
    if all(one.status in (Status.OK, Status.TIMEOUT) for one in results):
        return TimedOut.exit_code
    if all(one.status in (Status.OK, Status.TIMEOUT) or one.lacking for one in results):
        return EnvironmentLacks.exit_code
    return 1


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    cli.add_subject(parser)
    parser.add_argument(
        "--for",
        dest="targets",
        type=cli.filled,
        metavar="TARGETS",
        help="architectures or cards of the wiki, with commas (default: the workspace's platform, or the GPU here)",
    )
    cli.add_workload(parser)
    parser.add_argument("--emit", type=cli.path, metavar="FOLDER", help="write ptx, cubin, amdgcn and hsaco there")
    parser.add_argument(
        "--configurations",
        type=cli.positive_int,
        default=compiler.MOST_CONFIGURATIONS,
        metavar="N",
        help=f"compile at most N configurations of an autotuner (default {compiler.MOST_CONFIGURATIONS})",
    )
    cli.add_timeout(parser, 300, "in all")
    cli.add_sandbox(parser)
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
