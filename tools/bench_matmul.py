#!/usr/bin/env python3
"""What this GPU's arithmetic really gives: TFLOPS of a square matrix product on random data, per dtype.

torch's own library does the product, do_bench the timing. int8 counts integer operations, TOPS."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import benchmarks, cli

DTYPES = ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"]


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--size", type=cli.positive_int, default=8192, help="rows and columns (default 8192)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="default: all")
    benchmarks.add_options(parser)
    args = parser.parse_args()
    result = benchmarks.run("matmul", {"size": args.size, "dtypes": args.dtype, "rep_ms": args.rep_ms}, args.timeout)
    cli.emit(result, args.json, benchmarks.lines(result, lambda r: f"{r['dtype']} {r['size']}^3"))
    return 0


if __name__ == "__main__":
    cli.run(main)
