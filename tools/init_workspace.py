#!/usr/bin/env python3
"""Start a session: make the workspace /tmp/kernel_opt_NAME and print its path.

KERNEL defines ModelNew or kernel_function, or Model and get_inputs (a KernelBench problem), or both."""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli
from kernelopt.errors import Refused, UsageError
from kernelopt.hardware import wiki
from kernelopt.session import creation, platforms
from kernelopt.session.task import Task, dtype_name

FRAMEWORKS = ("triton", "gluon", "cutedsl", "cuda", "flydsl")  # gpu-wiki/docs/frameworks


def main() -> int:
    args = arguments()
    wiki_root = wiki.root(args.gpu_wiki).resolve()
    calibration = platforms.read(args.calibration) if args.calibration else None
    task = task_of(args, wiki_root, calibration)
    made = creation.create(args.root, args.name, args.kernel, args.reference, task, beside(args))
    with contextlib.suppress(OSError):  # a convenience link; an existing name stays as it is
        Path("/tmp/gpu-wiki").symlink_to(wiki_root)
    for lacking in unsaid(args):
        cli.say(f"workspace_init.sh: {lacking}")
    print(made.root)
    return 0


def unsaid(args) -> list[str]:
    """The warnings about missing parts of the session, with remedies."""
    warnings = []
    if args.platform is None and args.calibration is None:
        warnings.append("no --platform: there is no roofline and no target before calibrate_gpu.py --workspace W")
    if args.framework is not None and args.framework not in FRAMEWORKS:
        warnings.append(f"no page of the wiki is about {args.framework}; it has {', '.join(FRAMEWORKS)}")
    return warnings


def arguments():
    parser = cli.parser(__doc__, prog="workspace_init.sh")
    parser.add_argument("name", metavar="NAME", help="letters, digits, '_' and '-'")
    parser.add_argument("kernel", metavar="KERNEL", type=Path, help="the kernel or PyTorch file to start from")
    parser.add_argument("--reference", type=Path, help="file with Model and get_inputs, when KERNEL has none")
    parser.add_argument(
        "--root", type=cli.path, default=Path("/tmp"), help="where the workspace is made (default /tmp)"
    )
    parser.add_argument("--platform", type=cli.filled, help="target GPU as the wiki names it, for example H200")
    parser.add_argument(
        "--calibration",
        type=Path,
        help="a file of calibrate_gpu.py --out; its rates are used rather than the wiki's",
    )
    parser.add_argument("--framework", type=cli.filled, help=f"what the kernel is written in: {', '.join(FRAMEWORKS)}")
    parser.add_argument(
        "--dtype", type=cli.filled, help="cast floating inputs: bf16, fp16, fp32, fp64 (default: as the reference)"
    )
    parser.add_argument(
        "--tolerance", type=cli.tolerance, help="bound on |error| / (|reference| + scale) (default: by dtype)"
    )
    parser.add_argument("--notes", default="", help="constraints, known bottlenecks, preferred directions")
    cli.add_gpu_wiki(parser)
    return parser.parse_args()


def beside(args) -> dict[str, Path]:
    """The extra files for the workspace, by name."""
    return {platforms.CALIBRATION: args.calibration} if args.calibration else {}


def task_of(args, wiki_root: Path, calibration: wiki.Page | None) -> Task:
    platform = args.platform or (calibration and calibration.platform)
    try:
        page = platforms.known(platform, wiki_root, calibration) if platform else None
    except Refused as error:
        raise UsageError(
            f"--platform: {error}. For a card that the wiki lacks: start without --platform, then calibrate_gpu.py "
            "--workspace W"
        ) from None
    if calibration and not wiki.spellings(page) & wiki.spellings(calibration):
        raise UsageError(
            f"--calibration: {args.calibration} is of {calibration.platform}, the platform is {page.platform}"
        )
    return Task(
        platform=page.platform if page else None,
        arch=page.architecture if page else None,
        framework=args.framework,
        dtype=dtype_name(args.dtype) if args.dtype else None,
        tolerance=args.tolerance,
        shapes=None,
        additional_notes=args.notes,
        gpu_wiki_path=None if wiki_root == bundle.ROOT / "gpu-wiki" else str(wiki_root),
        calibration=platforms.CALIBRATION if calibration else None,
        work=None,
        targets=(),
    )


if __name__ == "__main__":
    cli.run(main)
