#!/usr/bin/env python3
"""What this GPU's memory really gives: copy, read and write bandwidth per buffer size.

Copy counts bytes read and bytes written; read and write count their one stream. torch does the moving, do_bench the
timing, with the L2 cache flushed before each call."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import benchmarks, cli


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--size-mb", type=cli.positive_int, nargs="+", default=[16, 64, 256, 1024, 4096], help="buffer sizes in MiB"
    )
    benchmarks.add_options(parser)
    args = parser.parse_args()
    sizes = [size << 20 for size in args.size_mb]
    result = benchmarks.run("bandwidth", {"sizes": sizes, "rep_ms": args.rep_ms}, args.timeout)
    cli.emit(result, args.json, benchmarks.lines(result, lambda r: f"{r['pattern']:5} {r['buffer_bytes'] >> 20:6} MiB"))
    return 0


if __name__ == "__main__":
    cli.run(main)
