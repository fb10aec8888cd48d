"""Roofline mathematics for whole problems. All functions are pure. Every hardware value comes from a wiki row.

Intensity is the FLOPs of the whole problem over its least bytes. The intensity of a single tile is no measure of HBM
traffic, because tiles share their reads through the L2.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..errors import Refused, UsageError
from . import wiki, wiki_rows
from .card import MaxClocks
from .work import Work

# The rows for the compute roof of a dtype, best first, after CEILING_ROWS. A `_matmul` row is what a library reaches:
# an opponent, no floor.
LIBRARY_ROWS = {
    "fp64": ("measured_fp64_matmul", "peak_fp64_tensor", "peak_fp64"),
    "fp32": ("measured_fp32_matmul", "peak_fp32"),
    "tf32": ("measured_tf32_matmul", "peak_tf32_tensor"),
    "fp16": ("measured_fp16_matmul", "peak_fp16_tensor"),
    "bf16": ("measured_bf16_matmul", "peak_bf16_tensor"),
    "fp8": ("measured_fp8_matmul", "peak_fp8_tensor"),
    "fp4": ("peak_fp4_tensor",),
    "int8": ("measured_int8_matmul", "peak_int8_tensor"),
    "int": (),
}
CEILING = "measured_{}_tensor_ceiling"  # the bare tensor operations of that dtype (measure_ceiling.py)
PROBLEM_CEILING = "measured_{}_problem_ceiling"  # the same beside the other arithmetic of one problem
LIBRARY_RATE = "a library's rate, which is no floor"  # a `_matmul` row, in words
SUSTAINED = "_sustained"  # ends the name of either where it was timed in calls in a row, under the power cap
COMPUTE_ROWS = {dtype: (CEILING.format(dtype), *rows) if rows else () for dtype, rows in LIBRARY_ROWS.items()}
# The largest of these is the limit for any kernel, which may use any format that holds the numbers. fp32 work may run
# as several tf32 products, and a narrower accumulator may be faster.
HALF = ("peak_fp16_tensor", "peak_fp16_tensor_fp16_accumulate", "peak_bf16_tensor")
LIMIT_ROWS = {
    "fp64": ("peak_fp64_tensor", "peak_fp64"),
    "fp32": ("peak_tf32_tensor", "peak_fp32"),
    "tf32": ("peak_tf32_tensor", "peak_fp32"),
    "fp16": (*HALF, "peak_fp32"),
    "bf16": ("peak_bf16_tensor", "peak_tf32_tensor", "peak_fp32"),
    "fp8": ("peak_fp8_tensor", "peak_fp8_tensor_fp16_accumulate", *HALF, "peak_fp32"),
    "int8": ("peak_int8_tensor", *HALF, "peak_fp32"),
    "fp4": ("peak_fp4_tensor", "peak_fp8_tensor", "peak_int8_tensor", *HALF, "peak_fp32"),
}
NOT_MEASURED = ("fp4", "int")  # calibrate_gpu.py has no product in these
BANDWIDTH_ROWS = ("measured_copy_bandwidth", "memory_bandwidth")
LIMIT_BANDWIDTH_ROWS = ("memory_bandwidth", "memory_bandwidth_highest")  # documents may give two values for one product
BEYOND_PCT = 102.0  # percent of the floor; two runs on one card agree within 2 %
TARGET_SHARE_PCT = 90.0  # of the attainable; the Stop Condition of the skills, unless the user asks for another


@dataclass(frozen=True)
class Roof:
    """The limits of a product for a problem. bandwidth, compute: attainable, measured if possible. sustained_compute:
    the same in calls in a row, where that was measured; for want of it what the bare tensor operations sustain.
    peak_…: documented. limit_…: the largest documented value. clocks: the clocks of the documented peaks."""

    bandwidth: wiki.Row | None
    compute: wiki.Row | None
    sustained_compute: wiki.Row | None
    peak_bandwidth: wiki.Row | None
    peak_compute: wiki.Row | None
    limit_bandwidth: wiki.Row | None
    limit_compute: wiki.Row | None
    l2_capacity: wiki.Row | None
    sm_clock: wiki.Row | None
    memory_clock: wiki.Row | None

    @property
    def l2_bytes(self) -> float:
        """The capacity of the L2 in bytes, or 0 if it is unknown."""
        return self.l2_capacity.value * 2**20 if self.l2_capacity else 0

    def citations(self) -> list[str]:
        rows = (self.bandwidth, self.peak_bandwidth, self.compute, self.peak_compute, self.l2_capacity)
        return list(dict.fromkeys(row.citation for row in rows if row))


def roof(page: wiki.Page, dtype: str, also: Sequence[str] = (), other_arithmetic: bool = False) -> Roof:
    """Return the roof of a product for arithmetic in `dtype`. Absent values are None. also: other dtypes that do a
    part of the FLOPs; the limit includes them. other_arithmetic: the problem has a ceiling of its own."""
    compute = COMPUTE_ROWS.get(dtype, ())
    if other_arithmetic:
        compute = (PROBLEM_CEILING.format(dtype), *compute)
    documented = [name for name in compute if name.startswith("peak")]
    attainable = _first(page, compute)
    sustained = [attainable.metric] if attainable else []
    if attainable and is_library_rate(attainable.metric) and not other_arithmetic:
        sustained.append(CEILING.format(dtype))  # which the wiki has of other cards; this card's own come first
    tensor = _first(page, ["boost_clock_tensor"]) if dtype not in ("fp64", "fp32") else None
    return Roof(
        bandwidth=_first(page, BANDWIDTH_ROWS),
        compute=attainable,
        sustained_compute=_first(page, [one + SUSTAINED for one in sustained]),
        peak_bandwidth=_first(page, ["memory_bandwidth"]),
        peak_compute=_first(page, documented),
        limit_bandwidth=_largest(page, LIMIT_BANDWIDTH_ROWS),
        limit_compute=_limit(page, [name for each in (dtype, *also) for name in LIMIT_ROWS.get(each, ())]),
        l2_capacity=_first(page, ["l2_capacity"]),
        sm_clock=tensor or _first(page, ["boost_clock"]),
        memory_clock=_first(page, ["memory_clock"]),
    )


def _first(page: wiki.Page, names) -> wiki.Row | None:
    """Return the first row that holds a value. Raise UsageError if its unit is not the expected one."""
    return next(iter(_rows(page, names)), None)


def _limit(page: wiki.Page, names: list[str]) -> wiki.Row | None:
    """Return the largest of these peaks, or None if one is unknown, because it could be larger. A page calls a
    tensor peak that the card lacks UNSUPPORTED. It has no row for other peaks that the card lacks."""
    peaks = [page.row(name) for name in names if not name.endswith("accumulate")]
    if any(row is None or row.text == "UNKNOWN" for row in peaks):
        return None
    return _largest(page, names)


def _largest(page: wiki.Page, names) -> wiki.Row | None:
    return max(_rows(page, names), key=lambda row: row.value, default=None)


def _rows(page: wiki.Page, names) -> list[wiki.Row]:
    found = [row for name in names if (row := page.known(name))]
    for row in found:
        if row.unit != (unit := wiki_rows.unit_of(row.metric)):
            raise UsageError(f"{row.page}:{row.line}: {row.metric} must be given in {unit}, not {row.unit}")
    return found


def lacking(page: wiki.Page, roof: Roof, work: Work) -> list[str]:
    """Return wiki lines for the missing values of a problem's roof. A value is missing if it is unknown or if the
    hardware lacks it."""
    lines = []
    if roof.bandwidth is None:
        lines.append(wiki.missing("memory_bandwidth"))
    if work.flops and roof.compute is None:
        name = (LIBRARY_ROWS.get(work.dtype) or (f"peak_{work.dtype}",))[-1]
        row = page.row(name)
        tried = page.row((LIBRARY_ROWS.get(work.dtype) or (name,))[0])
        lines.append(tried.citation if tried and not tried.known else row.citation if row else wiki.missing(name))
    return lines


def _remedy(work: Work, gaps: list[str]) -> str:
    """Return advice about values that a roof lacks. Values that the hardware lacks cannot be measured."""
    other = f"if the arithmetic is not in {work.dtype}, run: estimate_work.py --workspace W --work-dtype DTYPE"
    if any("UNSUPPORTED" in gap for gap in gaps):
        return f"This card has no such arithmetic; {other}"
    if work.flops and work.dtype in NOT_MEASURED:
        return f"No tool here measures {work.dtype}; {other}"
    return f"Measure this card: calibrate_gpu.py --workspace W. Or, {other}"


def roof_of(page: wiki.Page, work: Work) -> Roof:
    """Return the roof of a product for a problem. Absent values are None."""
    return roof(page, work.dtype, work.also or (), work.other_arithmetic is not None)


def roof_for(page: wiki.Page, work: Work) -> Roof:
    """`roof_of`. Raise Refused with the missing wiki values if there is no roof."""
    roof_of_work = roof_of(page, work)
    if gaps := lacking(page, roof_of_work, work):
        raise Refused(f"no roofline for {page.platform}: {'; '.join(gaps)}. {_remedy(work, gaps)}")
    return roof_of_work


@dataclass(frozen=True)
class Bound:
    """The limit of a problem on a roof.

    arithmetic_intensity, ridge_point: in FLOP/byte, or None if no byte moves or the roof has no compute row. bound:
    "memory" or "compute". floor_us: max(bytes / bandwidth, FLOPs / compute). library_rate: the compute row is what a
    library reaches, which is no floor; otherwise no version of this algorithm runs much faster. documented: the row
    was not measured.
    """

    arithmetic_intensity: float | None
    ridge_point: float | None
    bound: str
    floor_us: float
    library_rate: bool = False
    documented: bool = False


@dataclass(frozen=True)
class Utilization:
    """The rates and shares for a measured time. Without a roof, below_physical_limit is False and all fields except the
    rates are None.

    bandwidth_gbps: from the least bytes. The next six fields are those of Bound. …_pct: shares of the documented
    peaks, and of the floor (100 is the floor itself). limit_us: see physical_limit_us. sustained_us: the time of the
    FLOPs at the rate that the bare operations sustain; None for other bounds, and where it is unknown.
    """

    time_us: float
    tflops: float
    bandwidth_gbps: float
    arithmetic_intensity: float | None = None
    ridge_point: float | None = None
    bound: str | None = None
    floor_us: float | None = None
    library_rate: bool = False
    documented: bool = False
    tflops_peak_utilization_pct: float | None = None
    bandwidth_peak_utilization_pct: float | None = None
    floor_share_pct: float | None = None
    limit_us: float | None = None
    below_physical_limit: bool = False
    sustained_us: float | None = None

    def to_json(self) -> dict:
        return asdict(self)


def bound(flops: int, bytes_min: int, roof: Roof) -> Bound:
    """Return the bound of a problem. The roof needs a bandwidth, and a compute row if there are FLOPs (see
    `roof_for`)."""
    memory_us = bytes_min / (roof.bandwidth.value * 1e9) * 1e6
    compute_us = flops / (roof.compute.value * 1e12) * 1e6 if flops else 0.0
    bounded_by = "compute" if compute_us > memory_us else "memory"
    row = roof.compute if bounded_by == "compute" else roof.bandwidth
    return Bound(
        arithmetic_intensity=flops / bytes_min if bytes_min else None,
        ridge_point=roof.compute.value * 1e12 / (roof.bandwidth.value * 1e9) if roof.compute else None,
        bound=bounded_by,
        floor_us=max(memory_us, compute_us),
        library_rate=bounded_by == "compute" and is_library_rate(roof.compute.metric),
        documented=not is_measured(row.metric),
    )


def is_measured(metric: str) -> bool:
    """Return whether a row is a rate that was measured, not documented."""
    return metric.startswith("measured_")


def is_library_rate(metric: str) -> bool:
    """Return whether a row is what cuBLAS or PyTorch reach. Another kernel may be faster."""
    return is_measured(metric) and metric.removesuffix(SUSTAINED).endswith("_matmul")


def utilization(
    time_us: float, flops: int, bytes_min: int, roof: Roof | None, max_clocks: MaxClocks | None = None
) -> Utilization:
    """Return the utilization of a problem for a time in microseconds.

    roof: None gives only the rates, which need no hardware value. max_clocks: see `physical_limit_us`.
    """
    tflops = flops / time_us / 1e6
    gbps = bytes_min / time_us / 1e3
    if roof is None:
        return Utilization(time_us, tflops, gbps)
    limits = bound(flops, bytes_min, roof)
    limit_us = physical_limit_us(flops, bytes_min, roof, max_clocks)
    return Utilization(
        time_us,
        tflops,
        gbps,
        **vars(limits),
        tflops_peak_utilization_pct=100 * tflops / roof.peak_compute.value if roof.peak_compute else None,
        bandwidth_peak_utilization_pct=100 * gbps / roof.peak_bandwidth.value if roof.peak_bandwidth else None,
        floor_share_pct=100 * limits.floor_us / time_us,
        limit_us=limit_us,
        below_physical_limit=time_us < limit_us,
        sustained_us=sustained_us(flops, limits, roof),
    )


def sustained_us(flops: int, limits: Bound, roof: Roof) -> float | None:
    """The time of the FLOPs of a compute-bound problem at the rate that the bare operations sustain; None for other
    bounds, and where that rate is unknown."""
    row = roof.sustained_compute
    if limits.bound != "compute" or row is None or is_library_rate(row.metric):
        return None
    return flops / (row.value * 1e12) * 1e6


def share_words(result: Utilization) -> str:
    """ "95.2 % of the floor", or what that share is of where no floor was measured."""
    return f"{result.floor_share_pct:.1f} % of {floor_name(result.library_rate)}"


def floor_name(library_rate: bool, floor: str = "the floor") -> str:
    """`floor`, or what stands in for it where none was measured."""
    return LIBRARY_RATE if library_rate else floor


def beyond_floor(result: Utilization) -> str | None:
    """Return advice for a time that beats the floor by more than its uncertainty, because the floor or the kernel is
    then wrong.

    Return None for any other time.
    """
    if result.floor_share_pct is None or result.floor_share_pct <= BEYOND_PCT:
        return None
    if result.documented:
        return (
            "beyond the documented peak, which stands in for a measured floor: do the outputs need all that was "
            "counted (estimate_work.py --flops, --bytes)? This card may also run at higher clocks than the peak is of: "
            "measure_ceiling.py --workspace W"
        )
    if result.bound == "memory":
        return (
            "beyond the floor: do the outputs need all bytes that were counted (estimate_work.py --bytes)? The floor's "
            "rate is a copy's, and this mix of reads and writes may have a better one: measure_ceiling.py"
        )
    if result.library_rate:
        advice = f"faster than {LIBRARY_RATE}; measure the floor: measure_ceiling.py --workspace W"
        return None if result.sustained_us else advice  # that rate tells how much is left
    return (
        "beyond the floor: do the outputs need all FLOPs that were counted (estimate_work.py --flops)? The card may "
        "have been cooler or less loaded than when its ceiling was measured: measure_ceiling.py --workspace W"
    )


def physical_limit_us(flops: int, bytes_min: int, roof: Roof, max_clocks: MaxClocks | None = None) -> float:
    """Return the least time that the documented peaks allow, at the highest clocks of this card.

    max_clocks: the card's highest clocks; None uses the page's clocks. The documented peaks belong to a boost clock,
    which many boards exceed. If the card's clock is unknown, arithmetic has no limit. The limit is less strict than
    the floor on purpose: correct kernels may read more than they write, skip unneeded bytes, and leave results in the
    L2. A faster time means an impossible rate or a wrong count of the work.
    """
    clocks = max_clocks or MaxClocks()
    memory_us = compute_us = 0.0
    if roof.limit_bandwidth and roof.l2_capacity:  # an unknown L2 could hold any part of a problem
        rate = roof.limit_bandwidth.value * faster(roof.memory_clock, clocks.memory_clock_mhz)
        memory_us = max(0, bytes_min - roof.l2_bytes) / (rate * 1e9) * 1e6
    clock_known = max_clocks is None or (roof.sm_clock and clocks.sm_clock_mhz)
    if flops and roof.limit_compute and clock_known:
        rate = roof.limit_compute.value * faster(roof.sm_clock, clocks.sm_clock_mhz)
        compute_us = flops / (rate * 1e12) * 1e6
    return max(memory_us, compute_us)


def faster(page_clock: wiki.Row | None, highest_mhz: float | None) -> float:
    """Return the ratio of the card's highest clock to the page's clock. It is at least 1, and 1 if a clock is
    unknown."""
    return max(1.0, highest_mhz / page_clock.value) if page_clock and highest_mhz else 1.0


def fits_in_cache(bytes_min: int, roof: Roof) -> bool:
    """Return whether a problem is so small that the bandwidth of large buffers does not apply to it."""
    return 0 < bytes_min <= roof.l2_bytes
