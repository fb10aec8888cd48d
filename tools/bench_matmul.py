#!/usr/bin/env python3
"""Measures this GPU's arithmetic: TFLOPS of a square matrix product on random data, per dtype.

torch's own library does the product, do_bench the timing. int8 counts integer operations, TOPS."""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.hardware import card
from kernelopt.hardware.card import GpuState
from kernelopt.measure import card_rates

DTYPES = ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"]


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--size", type=cli.positive_int, default=8192, help="rows and columns (default 8192)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="default: all")
    cli.add_benchmark_options(parser)
    args = parser.parse_args()
    measured = measure(args)
    result = measured.to_json()
    text = card_rates.lines(result, lambda r: f"{r['dtype']} {r['size']}^3")
    cli.emit(result, args.json, text + [f"{dtype}: not measured: {why}" for dtype, why in measured.failed.items()])
    return 0 if measured.rates else 3


@dataclass(frozen=True)
class Measured:
    """The rates of a card, one JSON object of the worker each. failed: dtype -> why it has no rate. gpu_state: during
    all measurements."""

    device: str
    rates: list[dict]
    gpu_state: GpuState | None
    failed: dict[str, str]

    def to_json(self) -> dict:
        state = self.gpu_state and self.gpu_state.to_json()
        measured = {"unit": "TFLOPS", "rates": self.rates, "gpu_state": state}
        return {"device": self.device, **measured, "failed": self.failed}


def measure(args) -> Measured:
    """Measure each dtype in a separate job, so that a failure loses no other rate."""
    rates, failed, state = [], {}, None
    with card_rates.jobs(args.timeout) as (device, job):
        for dtype in args.dtype:
            try:
                report = job("matmul", size=args.size, dtype=dtype, rep_ms=args.rep_ms)
            except card_rates.Failed as error:
                failed[dtype] = str(error)
                continue
            rates += report["rates"]
            if report["gpu_state"]:
                state = card.merged([state, GpuState.from_json(report["gpu_state"])])
    return Measured(device.name, rates, state, failed)


if __name__ == "__main__":
    cli.run(main)
