#!/usr/bin/env python3
"""How fast is the kernel? The median of triton.testing.do_bench; with --against, a paired comparison as well.

Outputs of some timed calls are checked. Exit 1 when one is wrong or the times cannot be believed; with --against, 0 for
FASTER and 1 for EQUAL, SLOWER and AMBIGUOUS."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device import gpu
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import UsageError
from kernelopt.gate import acceptance
from kernelopt.measure import least_work, pairing, timing, verify
from kernelopt.session.target import KernelUnderTest, resolve


def main() -> int:
    args = arguments()
    target = resolve(args)
    with tempfile.TemporaryDirectory(dir=target.cache if target.cache and target.cache.exists() else None) as folder:
        opponent = find_opponent(args.against, target, Path(folder)) if args.against else None
        with Sandbox(args.device, target.cache, args.sandbox) as sandbox:
            result = measure(sandbox, target, opponent, args)
    if args.device == "cuda":
        limit, time_us = (
            least_work.limit_us(target, args.workload, sandbox.gpu, args.timeout),
            result["latency_us"]["median"],
        )
        if limit is not None and time_us < limit:
            raise timing.KernelFailed(acceptance.IMPOSSIBLE, acceptance.impossible(time_us, limit))
    cli.emit(result, args.json, lines(result))
    return 0 if result.get("verdict") in (None, "FASTER") else 1


def find_opponent(name: str, target: KernelUnderTest, folder: Path) -> Path:
    """A file, or a revision of the workspace's kernel.py."""
    if Path(name).is_file():
        return Path(name)
    if target.workspace is None:
        raise UsageError(f"--against: {name} is not a file (a git revision needs --workspace)")
    return target.workspace.extract(name, folder)


def measure(sandbox: Sandbox, target: KernelUnderTest, opponent: Path | None, args) -> dict:
    cli.say(f"timing {target.kernel} on {sandbox.device_name}")
    cases = timing.inputs(sandbox, target.reference, target.dtype, [args.workload], args.timeout)
    window = {"warmup_ms": args.warmup_ms, "rep_ms": args.rep_ms, "timeout_s": args.timeout}
    result = timing.measure(sandbox, target.kernel, opponent, cases, **window)[args.workload]
    timed, rounds = result.pop("timed"), result.pop("rounds")
    status, message = verify.check_timed(
        sandbox, target.reference, target.dtype, [timed], args.tolerance or target.tolerance, args.timeout
    )
    if status != "OK":
        raise timing.KernelFailed(status, message)
    if opponent:
        found = pairing.paired_verdict(rounds)
        result |= {**found, "against": args.against, "protocol": timing.PROTOCOL if sandbox.gpu else "host clock"}
    return {**result, "sandbox": sandbox.isolation}


def lines(result: dict) -> list[str]:
    time = result["latency_us"]
    found = [
        f"latency {time['median']:.2f} us (p20 {time['p20']:.2f}, p80 {time['p80']:.2f}, {time['n']} runs, "
        f"{result['clock']}) on {result['device']}, workload {result['workload']}"
    ]
    if result["gpu_us"]:
        found.append(
            f"GPU time {result['gpu_us']:.2f} us cold, {result['warm_us']:.2f} us warm; a call takes {result['call_us']:.2f} us"
        )
    if result["gpu_state"]:
        found.append(gpu.describe(result["gpu_state"]))
    if "verdict" in result:
        found.append(f"{result['verdict']} against {result['against']}: {pairing.describe(result)}")
    return found + [f"warning: {warning}" for warning in result["warnings"]]


def arguments():
    parser = cli.parser(__doc__)
    cli.add_subject(parser)
    cli.add_device(parser)
    parser.add_argument(
        "--against",
        type=cli.filled,
        metavar="FILE|REV",
        help="another kernel file (or a reference: PyTorch itself), or a revision",
    )
    parser.add_argument("--workload", default="default", help="which workload (default: the one of get_inputs)")
    parser.add_argument(
        "--warmup-ms", type=cli.positive_int, default=timing.WARMUP_MS, help="do_bench's warm-up, in milliseconds"
    )
    parser.add_argument(
        "--rep-ms", type=cli.positive_int, default=timing.REP_MS, help="do_bench's repetition, in milliseconds"
    )
    parser.add_argument(
        "--tolerance", type=cli.tolerance, help="for the outputs of timed calls, as in verify_kernel.py"
    )
    cli.add_sandbox(parser)
    parser.add_argument("--timeout", type=cli.positive_float, default=300, help="seconds per process (default 300)")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
