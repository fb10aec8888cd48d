#!/usr/bin/env python3
"""Measures this GPU's arithmetic: TFLOPS of a square matrix product on random data, per dtype.

torch's own library does the product, do_bench the timing. int8 counts integer operations, TOPS."""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.hardware import card
from kernelopt.measure import card_rates
from kernelopt.session.benchmark_reports import ProductRate, State

DTYPES = ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"]


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--size", type=cli.positive_int, default=8192, help="rows and columns (default 8192)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="default: all")
    cli.add_benchmark_options(parser)
    args = parser.parse_args()
    result = measured(args)
    cli.emit(result.to_json(), args.json, result.lines())
    return 0 if result.rates else 3


@dataclass(frozen=True)
class Measured:
    """The rates of all dtypes. gpu_state: of all their measurements. failed: the reason by dtype."""

    device: str
    unit: str
    rates: list[ProductRate]
    gpu_state: State
    failed: dict[str, str]

    def to_json(self) -> dict:
        rates, state = [rate.to_json() for rate in self.rates], self.gpu_state
        return {**vars(self), "rates": rates, "gpu_state": state and state.to_json()}

    def lines(self) -> list[str]:
        rates = [f"{one.dtype} {one.size}^3  {one.rate.describe(self.unit)}" for one in self.rates]
        failed = [f"{dtype}: not measured: {reason}" for dtype, reason in self.failed.items()]
        return [*rates, *card_rates.state_lines(self.gpu_state), *failed]


def measured(args) -> Measured:
    """Measure each dtype on its own."""
    rates, failed, state = [], {}, None
    with card_rates.jobs(args.timeout) as (device, measure):
        for dtype in args.dtype:
            try:
                one = measure("matmul", size=args.size, dtype=dtype, rep_ms=args.rep_ms)
                rates, state = [*rates, *one.rates], card.merged([state, one.gpu_state])
            except card_rates.Failed as error:
                failed[dtype] = str(error)
    return Measured(device.name, "TFLOPS", rates, state, failed)


if __name__ == "__main__":
    cli.run(main)
