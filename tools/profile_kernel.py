#!/usr/bin/env python3
"""Profile one version of a workspace's kernel, after warm-up, and diagnose it.

annotation (start here): roofline counters, findings, table against the version before. ncu: all sections, NVIDIA's
rules, hotspots by source line and instruction. event: time of each stage. nsys: timeline, gaps, overlap, cost of the
host's calls. Writes profiles/vN/MODE/. Clocks are left alone. exit 3: there are no
counters here; durations and resources are written nevertheless.
"""

import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.diagnosis import profile_run
from kernelopt.errors import EnvironmentLacks
from kernelopt.profilers import collect, ncu, nsys
from kernelopt.session.version_names import version_number
from kernelopt.session.workspace import Workspace


def main() -> int:
    args = arguments()
    version_number(args.version)
    workspace = Workspace(args.workspace)
    request = profile_run.Request(workspace, args.version, args.mode, args.workload, args.cache, args.timeout, args.out)
    folder = request.destination
    if args.dry_run:
        return dry_run(folder, args)
    written, lack = profile_run.run(request, cli.say)
    cli.emit({"folder": str(folder), **written.to_json()}, args.json, [str(folder), written.describe()])
    if lack:
        raise EnvironmentLacks(f"there are no counters: {lack}; {folder} has durations and resources")
    return 0


def dry_run(folder: Path, args) -> int:
    """Print the commands that would run, and the places of their files."""
    commands = {
        "annotation": lambda: ncu.command(folder / "report.ncu-rep", args.cache),
        "ncu": lambda: ncu.command(folder / "report.ncu-rep", args.cache, everything=True),
        "nsys": lambda: nsys.command(folder / "report.nsys-rep"),
        "event": lambda: ["torch.profiler (CUPTI), in the worker"],
    }
    command = shlex.join([*commands[args.mode](), "python -m kernelopt.worker …"])
    cli.emit({"folder": str(folder), "command": command}, args.json, [str(folder), command])
    return 0


def arguments():
    parser = cli.parser(__doc__, prog="profile_kernel.sh")
    cli.add_workspace(parser, required=True)
    parser.add_argument("--version", required=True, help="the version that is profiled, for example v0")
    parser.add_argument("--mode", choices=collect.MODES, default="annotation", help="default: annotation")
    cli.add_workload(parser)
    parser.add_argument(
        "--cache", choices=["cold", "warm"], default="cold", help="cold: caches flushed before each pass"
    )
    parser.add_argument("--out", type=cli.path, help="another folder than the workspace's profiles/vN/MODE")
    parser.add_argument("--dry-run", action="store_true", help="print the command line and the folder, start nothing")
    cli.add_timeout(parser, 600)
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
