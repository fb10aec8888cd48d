"""The calibration page: the properties and measured rates of one card, in the format of the wiki. All functions are
pure.

platforms.sealed ends the page with a digest of its text, so an edited page is refused; platforms.read parses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..hardware import wiki, wiki_rows
from ..hardware.card import Card, MaxClocks
from ..hardware.wiki import Page
from ..hardware.work import rate_unit
from .benchmark_reports import Bandwidth, BufferRate, Ceiling, Rate, RestedAndSustained, State

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
TENSOR_TYPE_NEEDED = ("tf32", "fp8")  # without such cores torch uses another dtype or refuses
PATTERNS = ("copy", "read", "write")
QUERIED = (  # metrics of gpu.query
    "compute_capability",
    "sm_count",
    "memory_capacity",
    "memory_clock",
    "memory_bus_width",
    "l2_capacity",
    "boost_clock",
    "tdp",
)
NOT_QUERIED = (
    "memory_bandwidth",
    "peak_fp64",
    "peak_fp32",
    "peak_fp16_tensor",
    "peak_bf16_tensor",
    "peak_fp8_tensor",
    "peak_int8_tensor",
)
NOT_SUPPORTED = ("not supported", "only supported", "not implemented", "NOT_SUPPORTED", "unsupported")


@dataclass(frozen=True)
class Measured:
    """The results of a calibration. properties: from gpu.query, in the wiki's units.
    power_limit_w: the limit in force. ceilings: by pattern, products: by dtype; each a report or the reason for its
    absence."""

    device: Card
    properties: dict[str, float | str]
    power_limit_w: float | None
    bandwidth: Bandwidth
    ceilings: dict[str, Ceiling | str]
    products: dict[str, RestedAndSustained | str]


def lacks(dtype: str, limits: Page | None) -> str | None:
    """Return the reason to skip a product in `dtype`, or None to measure it. The reason is a compute capability
    without tensor cores for the dtype."""
    types = limits.known("tensor_core_types") if limits else None
    if dtype not in TENSOR_TYPE_NEEDED or types is None or dtype.upper() in types.text.split("/"):
        return None
    return f"not supported: {types.citation}"


def body(measured: Measured, page: Page | None, limits: Page | None, date: str, command: str) -> str:
    """Return the page without its digest. page: the wiki's page of this product, or None. limits: the page of its
    compute capability."""
    name = measured.device.name
    rows = [*device_rows(measured, limits, page), *bandwidth_rows(measured), *product_rows(measured)]
    architecture = (page or limits).architecture if page or limits else "not known"
    return f"""# {page.platform if page else name}

What this very card gave, measured by calibrate_gpu.py. A `_sustained` row is the rate of calls back to back, under the
power limit.

Aliases: {name}
Architecture: {architecture}
Vendor: NVIDIA

{wiki.HEADER}
|---|---|---|---|---|---|
{chr(10).join(rows)}

## Bandwidth by size

GB/s of float32 buffers, median (p20 to p80), the L2 flushed before each call; copy counts bytes read and written.

{by_size(measured.bandwidth.rates)}

## Sources

- [calibration]: `{command}` on one {name} ({measured.device.uuid}), {date}, driver {measured.device.driver}, \
torch {measured.bandwidth.torch}, triton {measured.bandwidth.triton}, clocks as found; power limit in force \
{watts(measured.power_limit_w)}, highest clocks {clocks(measured.device.max_clocks)}.
"""


def row(metric: str, value: str, unit: str, kind: str, note: str = "-") -> str:
    source = "-" if value == "UNKNOWN" else "[calibration]"
    return (
        f"| {metric} | {value} | {unit} | {source} | {'-' if value == 'UNKNOWN' else kind} | {note.replace('|', '/')} |"
    )


def device_rows(measured: Measured, limits: Page | None, page: Page | None) -> list[str]:
    """Return the rows that the device reports and the rows derived from them. If the wiki has a page, only its gaps
    are filled. Without a page, unknown values get a row too."""
    values = {**measured.bandwidth.card, **measured.properties}
    known = {
        name: row(name, figure(values[name]), wiki_rows.unit_of(name), "device query")
        for name in QUERIED
        if name in values
    }
    known |= derived_rows(values, limits)
    if page:
        return [text for name, text in known.items() if name in QUERIED and page.known(name) is None]
    return [known.get(name) or row(name, "UNKNOWN", wiki_rows.unit_of(name), "") for name in (*QUERIED, *NOT_QUERIED)]


def derived_rows(values: dict[str, float | str], limits: Page | None) -> dict[str, str]:
    """Return the bandwidth of the bus, and the peak of the fp32 lanes at the highest clock."""
    lanes = limits.known("fp32_lanes_per_sm") if limits else None
    derived = wiki_rows.derived({**values, "fp32_lanes_per_sm": lanes.value} if lanes else values)
    return {
        name: row(name, figure(value), wiki_rows.unit_of(name), "device query, derived", formula)
        for name, (value, formula) in derived.items()
    }


def bandwidth_rows(measured: Measured) -> list[str]:
    """Return the best rate on the largest buffers, from torch's own operation or from a kernel that only moves
    bytes."""
    bandwidth = measured.bandwidth
    largest = max(one.buffer_bytes for one in bandwidth.rates)
    rows = []
    for pattern in PATTERNS:
        plain = next(one for one in bandwidth.rates if (one.pattern, one.buffer_bytes) == (pattern, largest))
        ceiling = measured.ceilings[pattern]
        tried = [("torch", plain.rate, bandwidth.gpu_state)]
        if isinstance(ceiling, Ceiling):
            tried.append(("a kernel that only moves bytes", ceiling.best.rate, ceiling.gpu_state))
        method, rate, state = max(tried, key=lambda one: one[1].median)
        note = f"{method}, {largest >> 20} MiB buffers; {scatter(rate)}; {condition(state)}"
        rows.append(row(f"measured_{pattern}_bandwidth", figure(rate.median), "GB/s", "measured", note))
    return rows


def product_rows(measured: Measured) -> list[str]:
    """Return two rows per dtype. The rested rate is timed like a kernel; the sustained rate is of calls back to
    back."""
    rows = []
    for dtype, one in measured.products.items():
        unit, metric = rate_unit(dtype), f"measured_{dtype}_matmul"
        if isinstance(one, str):
            value = "UNSUPPORTED" if any(sign in one for sign in NOT_SUPPORTED) else "UNKNOWN"
            rows.append(row(metric, value, unit, "measured", " ".join(one.split())[:200]))
            continue
        note = f"{one.size}^3, rested; {scatter(one.rested)}; {condition(one.rested_state)}"
        rows.append(row(metric, figure(one.rested.median), unit, "measured", note))
        note = f"{one.size}^3, back to back; {condition(one.sustained_state)}"
        rows.append(row(f"{metric}_sustained", figure(one.sustained_median), unit, "measured", note))
    return rows


def scatter(rate: Rate) -> str:
    return f"p20 {figure(rate.p20)}, p80 {figure(rate.p80)}"


def condition(state: State, clock: str = "") -> str:
    """Return the SM clock and the power during a measurement, as text. clock: what is known of the clock from within
    the kernel."""
    if state is None:
        return f"{clock}, power not reported" if clock else "clock and power not reported"
    reported, power, reasons = state.sm_clock_mhz, state.power_w, state.throttle_reasons
    parts = [
        clock or (f"SM {reported.median} MHz" if reported else "SM clock not reported"),
        f"{power.median:.0f} W" if power else "power not reported",
        f"throttled by {', '.join(reasons)}" if reasons else "",
    ]
    return ", ".join(filter(None, parts))


def foreign_processes(measured: Measured) -> list[int]:
    """Return the ids of other processes that used the GPU during any measurement."""
    reports = [measured.bandwidth, *measured.ceilings.values(), *measured.products.values()]
    states = [report.gpu_state for report in reports if not isinstance(report, str)]
    return sorted({pid for state in states if state for pid in state.foreign_processes})


def by_size(rates: Sequence[BufferRate]) -> str:
    """Return the table of the rates at each buffer size."""
    at = {(one.buffer_bytes, one.pattern): one.rate for one in rates}
    lines = [f"| buffer, MiB | {' | '.join(PATTERNS)} |", "|---|---|---|---|"]
    for size in sorted({one.buffer_bytes for one in rates}):
        cells = [
            f"{figure(rate.median)} ({figure(rate.p20)} to {figure(rate.p80)})"
            for rate in (at[size, pattern] for pattern in PATTERNS)
        ]
        lines.append(f"| {size >> 20} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(value: float | str) -> str:
    """Format a value with four digits: "1244", "61.9", "8.9"."""
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def watts(value: float | None) -> str:
    return "not reported" if value is None else f"{value:.0f} W"


def clocks(highest: MaxClocks) -> str:
    named = {"SM": highest.sm_clock_mhz, "memory": highest.memory_clock_mhz}
    return ", ".join(f"{name} {mhz} MHz" for name, mhz in named.items() if mhz is not None) or "not reported"
