"""The page of a calibration: what one card said of itself and what was measured on it, in the wiki's own form. Pure.

platforms.read takes the page back. Its last line is a digest of the text above it, so that a page which was edited is
refused.
"""

from dataclasses import dataclass

from ..hardware import wiki
from ..hardware.wiki import Page
from . import platforms

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
TENSOR_TYPE_NEEDED = ("tf32", "fp8")  # elsewhere torch takes another dtype for it, or refuses
PATTERNS = ("copy", "read", "write")
QUERIED = {  # metric of gpu.query -> unit
    "compute_capability": "-",
    "sm_count": "SM",
    "memory_capacity": "GB",
    "memory_clock": "MHz",
    "memory_bus_width": "bit",
    "l2_capacity": "MB",
    "boost_clock": "MHz",
    "tdp": "W",
}
UNTOLD = (
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
    """All that was asked of one card. device: of gpu.identify; said: of gpu.query, in the wiki's units;
    power_limit_w: in force. bandwidth: report of the job of that name; ceilings: pattern -> report of `ceiling`, or
    why there is none; products: dtype -> report of `product_rates`, or why there is none."""

    device: dict
    said: dict
    power_limit_w: float | None
    bandwidth: dict
    ceilings: dict[str, dict | str]
    products: dict[str, dict | str]


def lacks(dtype: str, limits: Page | None) -> str | None:
    """Why a product in `dtype` is not tried: the compute capability has no tensor cores for it. None to try it."""
    types = limits.known("tensor_core_types") if limits else None
    if dtype not in TENSOR_TYPE_NEEDED or types is None or dtype.upper() in types.text.split("/"):
        return None
    return f"not supported: {types.citation}"


def text(measured: Measured, page: Page | None, limits: Page | None, date: str, command: str) -> str:
    """The whole page. page: the wiki's of this product, None where it has none; limits: of its compute capability."""
    name = measured.device["name"]
    rows = [*device_rows(measured, limits, page), *bandwidth_rows(measured), *product_rows(measured)]
    architecture = (page or limits).architecture if page or limits else "not known"
    body = f"""# {page.platform if page else name}

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

{by_size(measured.bandwidth["rates"])}

## Sources

- [calibration]: `{command}` on one {name} ({measured.device["uuid"]}), {date}, driver {measured.device["driver"]}, \
torch {measured.bandwidth["torch"]}, triton {measured.bandwidth["triton"]}, clocks as found; power limit in force \
{watts(measured.power_limit_w)}, highest clocks {clocks(measured.device["max_clocks"])}.
"""
    return platforms.sealed(body)


def row(metric: str, value: str, unit: str, kind: str, note: str = "-") -> str:
    source = "-" if value == "UNKNOWN" else "[calibration]"
    return (
        f"| {metric} | {value} | {unit} | {source} | {'-' if value == 'UNKNOWN' else kind} | {note.replace('|', '/')} |"
    )


def device_rows(measured: Measured, limits: Page | None, page: Page | None) -> list[str]:
    """What the device says of itself and what follows from it: all of it where the wiki has no page, and what nobody
    knows; else what the page lacks."""
    said = {**measured.bandwidth["device"], **measured.said}
    known = {
        name: row(name, figure(said[name]), unit, "device query") for name, unit in QUERIED.items() if name in said
    }
    known |= derived_rows(said, limits)
    if page:
        return [text for name, text in known.items() if name in QUERIED and page.known(name) is None]
    names = dict.fromkeys([*QUERIED, *UNTOLD])
    units = {**QUERIED, "memory_bandwidth": "GB/s", "peak_int8_tensor": "TOPS"}
    return [known.get(name) or row(name, "UNKNOWN", units.get(name, "TFLOPS"), "") for name in names]


def derived_rows(said: dict, limits: Page | None) -> dict[str, str]:
    """The bandwidth of the bus, and what the fp32 lanes of the compute capability do at the highest clock."""
    found = {}
    if "memory_clock" in said and "memory_bus_width" in said:
        rate = said["memory_clock"] * 2 * said["memory_bus_width"] / 8 / 1000
        note = "memory_clock x 2 x memory_bus_width"
        found["memory_bandwidth"] = row("memory_bandwidth", figure(rate), "GB/s", "device query, derived", note)
    lanes = limits.known("fp32_lanes_per_sm") if limits else None
    if lanes and "sm_count" in said and "boost_clock" in said:
        peak = said["sm_count"] * lanes.value * 2 * said["boost_clock"] / 1e6
        note = "sm_count x fp32_lanes_per_sm x 2 x boost_clock"
        found["peak_fp32"] = row("peak_fp32", figure(peak), "TFLOPS", "device query, derived", note)
    return found


def bandwidth_rows(measured: Measured) -> list[str]:
    """The best that the largest buffers gave: torch's own operation, or a kernel that only moves bytes."""
    largest = max(rate["buffer_bytes"] for rate in measured.bandwidth["rates"])
    found = []
    for pattern in PATTERNS:
        plain = next(
            rate
            for rate in measured.bandwidth["rates"]
            if (rate["pattern"], rate["buffer_bytes"]) == (pattern, largest)
        )
        ceiling = measured.ceilings[pattern]
        tried = [("torch", plain, measured.bandwidth["gpu_state"])]
        if isinstance(ceiling, dict):
            tried.append(("a kernel that only moves bytes", ceiling["best"], ceiling["gpu_state"]))
        who, rate, state = max(tried, key=lambda one: one[1]["median"])
        scatter = f"p20 {figure(rate['p20'])}, p80 {figure(rate['p80'])}"
        note = f"{who}, {largest >> 20} MiB buffers; {scatter}; {condition(state)}"
        found.append(row(f"measured_{pattern}_bandwidth", figure(rate["median"]), "GB/s", "measured", note))
    return found


def product_rows(measured: Measured) -> list[str]:
    """Two rows a dtype: rested, as kernels are timed, and sustained."""
    found = []
    for dtype, one in measured.products.items():
        unit, metric = "TOPS" if dtype == "int8" else "TFLOPS", f"measured_{dtype}_matmul"
        if isinstance(one, str):
            value = "UNSUPPORTED" if any(sign in one for sign in NOT_SUPPORTED) else "UNKNOWN"
            found.append(row(metric, value, unit, "measured", " ".join(one.split())[:200]))
            continue
        shape = f"{one['size']}^3"
        rested, sustained = one["rested"], one["sustained"]
        spread = f"p20 {figure(rested['p20'])}, p80 {figure(rested['p80'])}"
        states = one["states"]
        note = f"{shape}, rested; {spread}; {condition(states['rested'])}"
        found.append(row(metric, figure(rested["median"]), unit, "measured", note))
        note = f"{shape}, back to back; {condition(states['sustained'])}"
        found.append(row(f"{metric}_sustained", figure(sustained["median"]), unit, "measured", note))
    return found


def condition(state: dict | None) -> str:
    """The SM clock and the power while something ran."""
    if state is None:
        return "clock and power not told"
    clock, power, reasons = state["sm_clock_mhz"], state["power_w"], state["throttle_reasons"]
    parts = [
        f"SM {clock['median']} MHz" if clock else "SM clock not told",
        f"{power['median']:.0f} W" if power else "power not told",
        f"throttled by {', '.join(reasons)}" if reasons else "",
    ]
    return ", ".join(filter(None, parts))


def foreign_processes(measured: Measured) -> list[int]:
    """Of all measurements, the processes that used the GPU beside them."""
    reports = [measured.bandwidth, *measured.ceilings.values(), *measured.products.values()]
    states = [report["gpu_state"] for report in reports if isinstance(report, dict)]
    return sorted({pid for state in states if state for pid in state.get("foreign_processes", [])})


def by_size(rates: list[dict]) -> str:
    """The table of all sizes."""
    at = {(rate["buffer_bytes"], rate["pattern"]): rate for rate in rates}
    lines = [f"| buffer, MiB | {' | '.join(PATTERNS)} |", "|---|---|---|---|"]
    for size in sorted({rate["buffer_bytes"] for rate in rates}):
        cells = [
            f"{figure(rate['median'])} ({figure(rate['p20'])} to {figure(rate['p80'])})"
            for rate in (at[size, pattern] for pattern in PATTERNS)
        ]
        lines.append(f"| {size >> 20} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(value: float | str) -> str:
    """Four digits: "1244", "61.9", "8.9"."""
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def watts(value: float | None) -> str:
    return "not told" if value is None else f"{value:.0f} W"


def clocks(highest: dict) -> str:
    names = {"sm_clock_mhz": "SM", "memory_clock_mhz": "memory"}
    return ", ".join(f"{names[name]} {value} MHz" for name, value in highest.items()) or "not told"
