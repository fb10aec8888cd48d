#!/usr/bin/env python3
"""Measures this GPU's memory: copy, read and write bandwidth per buffer size.

Copy counts bytes read and bytes written; read and write count their one stream. Cold: the L2 is flushed before each
call (triton.testing.do_bench), so DRAM answers. Warm: it is not (do_bench_cudagraph), so the knee at the L2 shows."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.errors import EnvironmentLacks
from kernelopt.measure import card_rates
from kernelopt.session.benchmark_reports import Bandwidth


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--size-mb",
        type=cli.positive_int,
        nargs="+",
        default=[1 << power for power in range(14)],
        help="buffer sizes in MiB (default 1 to 8192)",
    )
    parser.add_argument("--plot", action="store_true", help="show the sweep as a plot, too")
    cli.add_benchmark_options(parser)
    args = parser.parse_args()
    sizes = [size << 20 for size in args.size_mb]
    _, report = card_rates.run("bandwidth", {"sizes": sizes, "rep_ms": args.rep_ms}, args.timeout)
    if report.left_out:
        sizes = ", ".join(str(size >> 20) for size in report.left_out)
        cli.say(f"bench_bandwidth.py: left out, for too little memory is free: buffers of {sizes} MiB")
    if not report.rates:
        raise EnvironmentLacks("too little memory of the GPU is free; end what uses it, or pass a smaller --size-mb")
    plot = card_rates.plot(report.rates) if args.plot else []
    cli.emit(report.to_json(), args.json, [*lines(report), *plot])
    return 0


def lines(report: Bandwidth) -> list[str]:
    rates = [
        f"{one.pattern:5} {one.buffer_bytes >> 20:6} MiB {one.cache}  {one.rate.describe(report.unit)}"
        for one in report.rates
    ]
    return rates + card_rates.state_lines(report.gpu_state)


if __name__ == "__main__":
    cli.run(main)
