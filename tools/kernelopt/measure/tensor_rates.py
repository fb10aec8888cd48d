"""What this GPU's bare tensor operations take for a problem, and beside it what torch's library reaches."""

from dataclasses import dataclass

from ..errors import TimedOut
from ..hardware.card import Card
from ..hardware.work import OtherArithmetic, rate_unit
from ..session.benchmark_reports import RestedAndSustained
from ..session.ceiling_report import TensorCeiling
from . import card_rates

DTYPES = ("bf16", "fp16", "tf32", "fp8", "int8")
BENCH_MS = 100  # of do_bench, as calibrate_gpu.py
PAUSE_S, SUSTAINED_S = 0.5, 2.0
STEP = 1024  # of the sizes of a library's product


@dataclass(frozen=True)
class Measured:
    """ceilings: of the bare operations, then beside the problem's other arithmetic where it
    has any. library: of a square product of about as many FLOPs, or why there is none."""

    device: Card
    ceilings: tuple[TensorCeiling, ...]
    library: RestedAndSustained | str

    def to_json(self) -> dict:
        """The JSON object. library_rate: TFLOPS (TOPS for int8), rested and sustained, or null."""
        bare, *beside = self.ceilings
        return {
            "tensor": bare.to_json(),
            "with_other_arithmetic": beside[0].to_json() if beside else None,
            "library_rate": None if isinstance(self.library, str) else self.library.to_json(),
        }


def measure(dtype: str, flops: int, other: OtherArithmetic | None, timeout_s: float) -> Measured:
    """Measure the ceilings and the library's rate. card_rates.Failed: this card or its software has no such
    operations."""
    how = {"rep_ms": BENCH_MS, "pause_s": PAUSE_S, "sustained_s": SUSTAINED_S}
    with card_rates.jobs(timeout_s) as (device, job):
        made = []
        for beside in dict.fromkeys((None, other)):
            made.append(job("tensor_ceiling", dtype=dtype, flops=flops, other=beside and beside.to_json(), **how))
        try:
            library = job("product_rates", dtype=dtype, largest=size_of(flops), **how)
        except (card_rates.Failed, TimedOut) as error:
            library = str(error)
    return Measured(device, tuple(made), library)


def size_of(flops: int) -> int:
    """The rows of a square product of about as many FLOPs, in steps of STEP."""
    return max(STEP, round((flops / 2) ** (1 / 3) / STEP) * STEP)


def library_line(measured: Measured) -> str:
    """The library's rate in words, and its share of the ceiling."""
    library, ceiling = measured.library, measured.ceilings[0]
    if isinstance(library, str):
        return f"library rate: not measured: {library}"
    unit = rate_unit(ceiling.dtype)
    rested, sustained = library.rested.median, library.sustained_median
    return (
        f"library rate, an opponent and no floor: {rested:.0f} {unit} rested, {sustained:.0f} back to back at "
        f"{library.size}^3: {100 * rested / ceiling.rate('cold'):.0f} % and "
        f"{100 * sustained / ceiling.rate('sustained'):.0f} % of the bare tensor operations"
    )
