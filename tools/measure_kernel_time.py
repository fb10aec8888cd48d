#!/usr/bin/env python3
"""How fast is the kernel? The median of triton.testing.do_bench; with --against, a paired comparison as well.

Outputs of some timed calls are checked. Exit 1 when one is wrong or the times cannot be believed; with --against, 0 for
FASTER and 1 for EQUAL, SLOWER and AMBIGUOUS."""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import UsageError
from kernelopt.gate import acceptance
from kernelopt.hardware import roofline
from kernelopt.measure import least_work, pairing, timing
from kernelopt.measure.latency import Timing
from kernelopt.measure.oracle import Oracle
from kernelopt.session.subject import KernelUnderTest, resolve
from kernelopt.statuses import Speed, Status


def main() -> int:
    args = arguments()
    subject = resolve(args)
    if subject.workspace and by_hand(args):
        raise UsageError(f"estimate_work.py --workspace {args.workspace} takes --flops, --bytes and --work-dtype")
    with tempfile.TemporaryDirectory(dir=subject.cache if subject.cache and subject.cache.exists() else None) as folder:
        baseline = baseline_file(args.against, subject, Path(folder)) if args.against else None
        with Sandbox(args.device, subject.cache, args.sandbox) as sandbox:
            timed, comparison = measure(sandbox, subject, baseline, args)
    result = timed.to_json()
    if comparison:
        protocol = timing.PROTOCOL if sandbox.gpu else "host clock"
        result |= {**comparison.to_json(), "against": args.against, "protocol": protocol}
    result["sandbox"] = sandbox.isolation
    cli.emit(result, args.json, lines(timed, comparison, args.against))
    return 0 if comparison is None or comparison.verdict == Speed.FASTER else 1


def by_hand(args) -> dict[str, int | str]:
    """The figures of the least work that were given, for Work.given."""
    given = {"dtype": args.work_dtype, "flops": args.flops, "bytes_min": args.bytes}
    return {name: figure for name, figure in given.items() if figure is not None}


def check_possible(limit_us: float | None, time_us: float) -> None:
    """KernelFailed when a time is below what the hardware allows. limit_us: None when it is unknown."""
    if limit_us is not None and time_us < limit_us:
        raise timing.KernelFailed(Status.IMPOSSIBLE_TIME, acceptance.impossible(time_us, limit_us))


def baseline_file(name: str, subject: KernelUnderTest, folder: Path) -> Path:
    """A file, or a revision of the workspace's kernel.py."""
    if Path(name).is_file():
        return Path(name)
    if subject.workspace is None:
        raise UsageError(f"--against: {name} is not a file (a git revision needs --workspace)")
    return subject.workspace.extract(name, folder)


def measure(
    sandbox: Sandbox, subject: KernelUnderTest, baseline: Path | None, args
) -> tuple[Timing, pairing.Comparison | None]:
    """The timing of the kernel, and its comparison with the baseline. KernelFailed when a timed output is wrong, or the
    time is below what the hardware allows."""
    cli.say(f"timing {subject.kernel} on {sandbox.device_name}")
    timing.get_ready(sandbox, baseline is not None, "estimate")
    cases = timing.inputs(sandbox, subject.reference, subject.dtype, [args.workload], args.timeout)
    window = {"warmup_ms": args.warmup_ms, "rep_ms": args.rep_ms, "timeout_s": args.timeout}
    measured = timing.measure(sandbox, subject.kernel, baseline, cases, **window)[args.workload]
    judged = replace(subject, tolerance=args.tolerance or subject.tolerance)
    with ThreadPoolExecutor(1) as beside:
        work = (sandbox, subject, args.workload, args.timeout, by_hand(args))
        limit = beside.submit(least_work.limit_us, *work) if sandbox.gpu else None
        fault = Oracle.of(sandbox, judged, args.timeout).fault_of_timed([measured.outputs])
    if fault:
        raise timing.KernelFailed(fault.status, fault.message)
    check_possible(limit and limit.result(), measured.timing.latency.median_us)
    return measured.timing, pairing.compare(measured.runs) if baseline else None


def lines(timed: Timing, comparison: pairing.Comparison | None, against: str | None) -> list[str]:
    time = timed.latency
    text = [
        f"latency {time.median_us:.2f} us (p20 {time.p20_us:.2f}, p80 {time.p80_us:.2f}, {time.runs} runs, "
        f"{timed.clock}) on {timed.device}, workload {timed.workload}"
    ]
    if timed.gpu_us:
        warm = f", {timed.warm_words} warm" if timed.warm_words else ""
        text.append(f"GPU time {timed.gpu_us:.2f} us cold{warm}; a call takes {timed.call_us:.2f} us")
    if timed.gpu_state:
        text.append(timed.gpu_state.describe())
    if comparison:
        text.append(f"{comparison.verdict} against {against}: {comparison.describe()}")
    return text + [f"warning: {warning}" for warning in timed.warnings()]


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
    cli.add_workload(parser)
    cli.add_work(parser, roofline.COMPUTE_ROWS, "of the workload")
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
    cli.add_timeout(parser, 300)
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
