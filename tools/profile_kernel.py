#!/usr/bin/env python3
"""Profile one version of a workspace's kernel, after warm-up, and diagnose it.

annotation (start here): roofline counters, findings, table against the version before. ncu: all sections, NVIDIA's rules, hotspots
by source line and instruction. event: time of each stage. nsys: timeline, gaps, overlap, cost of the host's calls.
Writes profiles/vN/MODE/. Clocks are left alone. exit 3, with durations and resources all the same: no counters here."""

import contextlib
import shlex
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli, memory, platforms, profile_pages, profiling, rounds, subject, timing, wiki
from kernelopt.errors import EnvironmentLacks, Refused, UsageError
from kernelopt.profilers import ncu, nsys
from kernelopt.sandbox import Sandbox
from kernelopt.workspace import Workspace, digest, version_number

OWN_FILES = (
    "report.ncu-rep",
    "report.nsys-rep",
    "trace.json",
    "timeline.json",
    "metrics.json",
    "params.json",
    "hotspots.json",
    "report.md",
    "report-verbose.md",
)
OWN_FOLDERS = ("sass", "source", "compiled")


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace)
    version_number(args.version)
    folder = args.out or workspace.profile(args.version, args.mode)
    if args.dry_run:
        return dry_run(folder, args)
    with Sandbox("cuda", workspace.cache) as sandbox:
        profile, lack = take(sandbox, workspace, folder, args)
    result, lines = profile_pages.write(folder, args.mode, profile, workspace)
    cli.emit({"folder": str(folder), **result}, args.json, [str(folder), *lines])
    if lack:
        raise EnvironmentLacks(f"no counters, durations and resources alone are in {folder}: {lack}")
    return 0


def take(sandbox: Sandbox, workspace: Workspace, folder: Path, args) -> tuple[dict, str | None]:
    what = subject.of_workspace(workspace)
    kernel = kernel_of(workspace, args.version, sandbox.scratch)
    case = timing.inputs(sandbox, what.reference, what.dtype, [args.workload], args.timeout, count=1)[args.workload][0]
    folder.mkdir(parents=True, exist_ok=True)
    for name in OWN_FILES:  # never let old findings stand beside a new report
        (folder / name).unlink(missing_ok=True)
    for name in OWN_FOLDERS if args.out is None else ():  # where --out leads, folders of these names may be anybody's
        shutil.rmtree(folder / name, ignore_errors=True)
    cli.say(f"profiling {args.version} on {sandbox.device_name}, mode {args.mode}, workload {args.workload}")
    profiled = profiling.Call(
        kernel, args.version, args.workload, case, args.cache, args.timeout, page_of(sandbox.device_name, workspace)
    )
    work = (workspace.task()["work"] or {}).get(args.workload)
    return profiling.take(args.mode, sandbox, profiled, folder, work)


def page_of(device: str, workspace: Workspace) -> wiki.Page | None:
    """The page of the device; None where nobody has one."""
    with contextlib.suppress(Refused):
        return platforms.of_device(device, workspace)
    return None


def dry_run(folder: Path, args) -> int:
    """Say what would be started, and where its files would go."""
    commands = {
        "annotation": lambda: ncu.command(folder / "report.ncu-rep", args.cache),
        "ncu": lambda: ncu.command(folder / "report.ncu-rep", args.cache, everything=True),
        "nsys": lambda: nsys.command(folder / "report.nsys-rep"),
        "event": lambda: ["torch.profiler (CUPTI), in the worker"],
    }
    command = shlex.join([*commands[args.mode](), "python -m kernelopt.worker …"])
    cli.emit({"folder": str(folder), "command": command}, args.json, [str(folder), command])
    return 0


def kernel_of(workspace: Workspace, version: str, scratch: Path) -> Path:
    """The kernel of a version: kernel.py for the one being worked on, else from the history or rejected/."""
    records = memory.Memory(workspace)
    if version not in records.versions():
        if version != records.next_version():
            raise UsageError(f"{version} is not recorded; kernel.py is {records.next_version()}")
        return workspace.kernel
    record = records.read(version)
    if record["kernel_sha256"] in (None, digest(workspace.kernel)):
        return workspace.kernel
    path = scratch / f"{version}_kernel.py"
    path.write_bytes(rounds.kernel_of(workspace, record))
    return path


def arguments():
    parser = cli.parser(__doc__, prog="profile_kernel.sh")
    parser.add_argument("--workspace", type=Path, required=True, help="a workspace made by reference/workspace_init.sh")
    parser.add_argument("--version", required=True, help="the version that is profiled, for example v0")
    parser.add_argument("--mode", choices=profiling.MODES, default="annotation", help="default: annotation")
    parser.add_argument("--workload", default="default", help="which workload (default: the one of get_inputs)")
    parser.add_argument(
        "--cache", choices=["cold", "warm"], default="cold", help="cold: caches flushed before each pass"
    )
    parser.add_argument("--out", type=cli.path, help="another folder than the workspace's profiles/vN/MODE")
    parser.add_argument("--dry-run", action="store_true", help="print the command line and the folder, start nothing")
    parser.add_argument("--timeout", type=cli.positive_float, default=600, help="seconds per process (default 600)")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
