#!/usr/bin/env python3
"""Write an accepted kernel of a workspace in a format of another project.

flashinfer-bench: a solution, one JSON file; gpu-mode: submission.py; hf-kernels: a package for Hugging Face kernels.
The artefact is loaded back as its format loads it, in a process of its own, and compared with the kernel on the task's
own inputs. Nothing is left when it does not load, or computes something else (exit 1)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device.sandbox import Sandbox
from kernelopt.formats import exporting
from kernelopt.formats.artefact import Options
from kernelopt.session.workspace import Workspace


def main() -> int:
    args = arguments()
    options = Options(args.name, args.author, args.license, args.definition, args.leaderboard, tuple(args.gpus or ()))
    exporting.check_options(args.format, options)
    workspace = Workspace(args.workspace)
    record = exporting.accepted(workspace, args.version)
    with Sandbox(args.device, workspace.cache, args.sandbox) as sandbox:
        cli.say(f"writing {record.version} as {args.format}, and loading it back on {sandbox.device_name}")
        done = exporting.export(
            sandbox,
            workspace,
            record,
            args.format,
            options,
            args.out,
            force=args.force,
            workloads=args.workload,
            timeout_s=args.timeout,
        )
    result = {
        "format": args.format,
        "version": record.version,
        "commit": record.git_commit_hash,
        "files": list(map(str, done.files)),
        "remarks": list(done.remarks),
        "loaded_back": done.loaded.to_json(),
    }
    lines = [*result["files"], f"{record.version}, {done.loaded.sentence}", *(f"- {one}" for one in done.remarks)]
    cli.emit(result, args.json, lines)
    return 0


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument("--workspace", type=Path, required=True, metavar="W", help="whose accepted kernel is written")
    parser.add_argument("--format", required=True, choices=list(exporting.FORMATS), help="what to write")
    parser.add_argument(
        "--out", type=cli.path, required=True, metavar="PATH", help="a folder; for a single file also its name"
    )
    parser.add_argument("--version", type=cli.filled, metavar="vN", help="an accepted version (default: the best)")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    parser.add_argument("--name", type=cli.filled, help="of the artefact (default: from the workspace's name)")
    parser.add_argument("--author", type=cli.filled, help="flashinfer-bench needs it; the others name it")
    parser.add_argument("--license", type=cli.filled, help="its identifier, such as apache-2.0; hf-kernels needs it")
    parser.add_argument("--definition", type=cli.filled, help="flashinfer-bench: the definition that is solved")
    parser.add_argument("--leaderboard", type=cli.filled, help="gpu-mode: its name")
    parser.add_argument(
        "--gpus",
        nargs="+",
        type=cli.filled,
        metavar="GPU",
        help="gpu-mode, flashinfer-bench: for which, in their spelling (the latter names the recorded one by itself)",
    )
    parser.add_argument("--workload", nargs="+", metavar="NAME", help="load it back on these alone (default: all)")
    cli.add_run(parser, timeout_s=300)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
