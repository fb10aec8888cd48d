#!/usr/bin/env python3
"""Which kernels of a model are worth writing? Profiles a steady step, and says what the whole could gain.

MODEL.py is your own file: load() returns a torch.nn.Module, inputs() its arguments; workloads() and loss() are optional
(docs/models.md). A Hugging Face config does as well: a folder, config.json, or a name; its weights are random. Prints
the step's time, how long the GPU waits, what torch.compile and CUDA graphs make of the same step, and the kernels by
module: time, share, floor, and what the step could save at most if they ran at their floor. Ends with advice, the first
thing first. Without a GPU it shows the CPU's operators, with no floors."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import UsageError
from kernelopt.models import finding, hugging_face
from kernelopt.models.advice import WAYS, advice
from kernelopt.report import step_page

BY_DEFAULT = ("compiled", "tuned", "graph", "compiled_graph")


def main() -> int:
    args = arguments()
    if args.recorded and (args.model or args.write):
        raise UsageError("--recorded takes the place of MODEL.py and --write; leave them out")
    if args.recorded:
        recording, source = finding.Recording.load(args.recorded), "recorded"
    else:
        recording, source = measured(args), "measured"
    if args.save:
        recording.save(args.save)
    result = finding.report(recording, source)
    if args.page:
        bundle.write_text(args.page, step_page.page(result).html())
    cli.emit({**result.to_json(), "advice": advice(result)}, args.json, list(finding.lines(result, args.all)))
    return 0


def measured(args) -> finding.Recording:
    if not args.model:
        raise UsageError("pass MODEL.py, or --recorded FILE")
    if unknown := [way for way in args.ways if way not in WAYS]:
        raise UsageError(f"--ways: {unknown[0]} is none of {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory() as folder:
        return profiled(args, model_file(args.model, args.write, Path(folder)))


def model_file(model: Path, write: Path | None, folder: Path) -> Path:
    """The model's file. That of a config is written first."""
    if hugging_face.is_config(model):
        file = write or folder / "model.py"
        hugging_face.write(model, file)
        return file
    if write:
        raise UsageError(f"--write goes with a Hugging Face config; {model} is a file of your own")
    hugging_face.check_file(model)
    return model


def profiled(args, model: Path) -> finding.Recording:
    wanted = finding.Wanted(
        model,
        args.workload,
        args.training,
        tuple(args.ways),
        args.budget_seconds,
        args.compile_seconds,
        args.timeout,
    )
    with Sandbox(args.device, None, args.sandbox) as sandbox:
        cli.say(f"profiling {args.model} on {sandbox.device_name}")
        return finding.profile(sandbox, wanted)


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument(
        "model", type=cli.path, nargs="?", metavar="MODEL.py", help="has load() and inputs(); or a config"
    )
    parser.add_argument("--write", type=cli.path, metavar="FILE", help="keep the MODEL.py that a config becomes")
    parser.add_argument("--workload", type=cli.filled, metavar="NAME", help="which of the model's (default: its first)")
    parser.add_argument("--training", action="store_true", help="a step is forward and backward")
    parser.add_argument(
        "--ways",
        nargs="*",
        default=BY_DEFAULT,
        metavar="WAY",
        help=f"ways of running to time beside the eager one: {', '.join(WAYS)} (default: {', '.join(BY_DEFAULT)})",
    )
    parser.add_argument(
        "--budget-seconds", type=cli.positive_float, default=10, metavar="S", help="to time each way (default 10)"
    )
    cli.add_compile_seconds(parser)
    parser.add_argument("--all", action="store_true", help="all groups, the small ones too")
    parser.add_argument("--save", type=cli.path, metavar="FILE", help="keep the profile, a gzipped Chrome trace")
    parser.add_argument("--recorded", type=cli.path, metavar="FILE", help="a kept profile in place of MODEL.py")
    parser.add_argument("--page", type=cli.path, metavar="FILE", help="write an HTML page as well")
    cli.add_run(parser, timeout_s=1800)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
