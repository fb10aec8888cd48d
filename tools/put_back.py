#!/usr/bin/env python3
"""Put a workspace's accepted kernel back into the model, and check and time the whole.

The kernel becomes an operator of torch.library, in place of the modules at --at (default: where the problem was cut
out). Compared with the original: outputs and buffers in each workload, torch.library.opcheck, torch.compile with
dynamic sizes; with --training gradients; with --generate greedy tokens. On a GPU the step before and after is timed in
turn, eager, compiled, and both in a CUDA graph. The result goes to W/put_back/ and the report; model_swap.py there
uses the kernel without these tools.
Exit 1 when the model is wrong, or when its fastest step with the kernel is not faster than its fastest without."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device.sandbox import Sandbox
from kernelopt.models import hugging_face, putting_back
from kernelopt.session.workspace import Workspace

TOKENS = 64


def main() -> int:
    args = arguments()
    hugging_face.check_file(args.model)
    workspace = Workspace(args.workspace)
    kernel = putting_back.kernel_of(workspace, args.candidate)
    wanted = putting_back.Wanted(
        args.model,
        args.at,
        args.where,
        args.workload,
        args.training,
        args.generate,
        args.tolerance,
        args.budget_seconds,
        args.compile_seconds,
        args.timeout,
    )
    with Sandbox(args.device, workspace.cache, args.sandbox) as sandbox:
        cli.say(f"putting {kernel.version or 'kernel.py'} into {args.model} on {sandbox.device_name}")
        result = putting_back.put_back(sandbox, workspace, kernel, wanted)
    cli.emit(result.to_json(), args.json, list(putting_back.lines(result, workspace)))
    return 0 if putting_back.is_good(result) else 1


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument("workspace", type=Path, metavar="WORKSPACE")
    parser.add_argument("model", type=cli.path, metavar="MODEL.py", help="has load() and inputs() or workloads()")
    parser.add_argument("--at", metavar="PATTERN", help="module paths, * for one part: layers.*.mlp")
    parser.add_argument(
        "--where",
        type=cli.filled,
        metavar="CONDITION",
        help="the calls that the kernel takes, in names of the module's arguments: 'x.shape[1] == 1' (default: all)",
    )
    parser.add_argument(
        "--workload", type=cli.filled, metavar="NAME", help="whose step is timed (default: the one of the cut)"
    )
    parser.add_argument("--training", action="store_true", help="compare gradients too; a step then includes them")
    parser.add_argument(
        "--generate",
        nargs="?",
        type=cli.positive_int,
        const=TOKENS,
        default=0,
        metavar="N",
        help=f"compare N greedy tokens of a language model (default {TOKENS})",
    )
    parser.add_argument("--candidate", action="store_true", help="kernel.py as it stands, though it is not accepted")
    parser.add_argument(
        "--tolerance", type=cli.tolerance, help="bound on |error| / (|original| + scale) (default: by dtype)"
    )
    parser.add_argument(
        "--budget-seconds", type=cli.positive_float, default=20, metavar="S", help="to time each way (default 20)"
    )
    cli.add_compile_seconds(parser)
    cli.add_run(parser, timeout_s=1800)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
