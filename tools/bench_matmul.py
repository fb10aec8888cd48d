#!/usr/bin/env python3
"""Measures this GPU's arithmetic: TFLOPS of a square matrix product on random data, per dtype.

torch's own library does the product, do_bench the timing. int8 counts integer operations, TOPS."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device import gpu
from kernelopt.measure import card_rates

DTYPES = ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"]


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--size", type=cli.positive_int, default=8192, help="rows and columns (default 8192)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="default: all")
    cli.add_benchmark_options(parser)
    args = parser.parse_args()
    result = measured(args)
    text = card_rates.lines(result, lambda r: f"{r['dtype']} {r['size']}^3")
    cli.emit(result, args.json, text + [f"{dtype}: not measured: {why}" for dtype, why in result["failed"].items()])
    return 0 if result["rates"] else 3


def measured(args) -> dict:
    """Measure each dtype on its own: {device, unit, rates, gpu_state, failed{dtype: why}}; gpu_state: of all
    together."""
    rates, failed, state = [], {}, None
    with card_rates.jobs(args.timeout) as (device, measure):
        for dtype in args.dtype:
            try:
                one = measure("matmul", size=args.size, dtype=dtype, rep_ms=args.rep_ms)
                rates, state = rates + one["rates"], gpu.merged([state, one["gpu_state"]])
            except card_rates.Failed as error:
                failed[dtype] = str(error)
    return {"device": device["name"], "unit": "TFLOPS", "rates": rates, "gpu_state": state, "failed": failed}


if __name__ == "__main__":
    cli.run(main)
