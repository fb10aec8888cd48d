#!/usr/bin/env python3
"""Profile one call of a workspace's kernel with Nsight Compute, after warm-up, and diagnose it.

Writes profiles/vN/annotation/: report.ncu-rep, params.json, metrics.json, report.md. Clocks are left alone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli, diagnosis, gpu, memory, metrics, profile_report, subject, timing
from kernelopt.errors import UsageError
from kernelopt.profilers import ncu
from kernelopt.sandbox import Sandbox
from kernelopt.workspace import Workspace, digest, version_number


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace)
    version_number(args.version)
    folder = workspace.profile(args.version, args.mode)
    ncu.program()  # is there an ncu at all? before anything is started
    with Sandbox("cuda", workspace.cache) as sandbox:
        profile = collect(sandbox, workspace, folder, args)
    found = diagnosis.analyse(profile, metrics.thresholds())
    bundle.write_json(folder / "metrics.json", {"kernels": profile["kernels"], "work": profile["work"]})
    bundle.write_json(folder / "params.json", profile["params"])
    text = profile_report.markdown(profile, found, profile_report.previous(workspace, profile["params"]))
    bundle.write_text(folder / "report.md", text)
    cli.emit({"folder": str(folder), **found}, args.json, [str(folder), profile_report.summary_line(found)])
    return 0


def collect(sandbox: Sandbox, workspace: Workspace, folder: Path, args) -> dict:
    what = subject.of_workspace(workspace)
    kernel = kernel_of(workspace, args.version, sandbox.scratch)
    case = timing.inputs(sandbox, what.reference, what.dtype, [args.workload], args.timeout, count=1)[args.workload][0]
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.json", "params.json", "report.md"):  # never let old findings stand beside a new report
        (folder / name).unlink(missing_ok=True)
    cli.say(f"profiling {args.version} on {sandbox.device_name}, workload {args.workload}")
    report = folder / "report.ncu-rep"
    with gpu.Watch() as watch:
        outcome = ncu.collect(sandbox, kernel, case, report, args.cache, args.timeout)
    params = {
        "version": args.version,
        "kernel_sha256": digest(kernel),
        "workload": args.workload,
        "shapes": case["shapes"],
        "dtype": case["dtype"],
        "device": sandbox.device_name,
        "driver": sandbox.gpu["driver"],
        "torch": outcome.result["torch"],
        "profiler": ncu.program_version(),
        "cache": args.cache,
        "clocks": "as found, not locked",
        "gpu_state": watch.state(outcome.result["window"]),
        "timestamp": memory.now(),
        "wall_s": outcome.wall_s,
    }
    task = workspace.task()
    work = (task["work"] or {}).get(args.workload)
    return {"kernels": ncu.read(report), "work": work, "params": params}


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
    if record["git_commit_hash"]:
        return workspace.extract(record["git_commit_hash"], scratch)
    for path in (workspace.root / "rejected").glob(f"{version}_kernel*.py"):
        if digest(path) == record["kernel_sha256"]:
            return path
    raise UsageError(f"the kernel of {version} is nowhere to be found: not in the history, not in rejected/")


def arguments():
    parser = cli.parser(__doc__, prog="profile_kernel.sh")
    parser.add_argument("--workspace", type=Path, required=True, help="a workspace made by reference/workspace_init.sh")
    parser.add_argument("--version", required=True, help="the version that is profiled, for example v0")
    parser.add_argument(
        "--mode", choices=[profile_report.MODE], default=profile_report.MODE, help="annotation: roofline counters"
    )
    parser.add_argument("--workload", default="default", help="which workload (default: the one of get_inputs)")
    parser.add_argument(
        "--cache", choices=["cold", "warm"], default="cold", help="cold: caches flushed before each pass"
    )
    parser.add_argument("--timeout", type=cli.positive_float, default=600, help="seconds per process (default 600)")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
