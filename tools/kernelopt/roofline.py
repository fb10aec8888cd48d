"""Roofline mathematics for whole problems. Pure functions; every hardware value comes in as a wiki row.

Intensity is FLOPs of the whole problem over its least bytes. A single tile's intensity says nothing about HBM,
because tiles share what they read through the L2.
"""

from dataclasses import dataclass

from . import wiki
from .errors import Refused, UsageError

# Which row is the roof for arithmetic in a dtype, best first: measured before documented.
COMPUTE_ROWS = {
    "fp64": ("measured_fp64_matmul", "peak_fp64_tensor", "peak_fp64"),
    "fp32": ("measured_fp32_matmul", "peak_fp32"),
    "tf32": ("measured_tf32_matmul", "peak_tf32_tensor"),
    "fp16": ("measured_fp16_matmul", "peak_fp16_tensor"),
    "bf16": ("measured_bf16_matmul", "peak_bf16_tensor"),
    "fp8": ("measured_fp8_matmul", "peak_fp8_tensor"),
    "int8": ("measured_int8_matmul", "peak_int8_tensor"),
    "int": (),
}
# What no kernel can beat, where it is not the documented peak of the dtype itself: fp32 work may run as several
# tf32 products.
LIMIT_ROWS = {"fp32": ("peak_tf32_tensor", "peak_fp32")}
UNITS = {"bandwidth": "GB/s", "capacity": "MB", "int8": "TOPS"}  # of a row, by a word in its name; else TFLOPS
BANDWIDTH_ROWS = ("measured_copy_bandwidth", "memory_bandwidth")
BEYOND_PCT = 102.0  # a share of the floor; what the same row gave on one card in two runs lies within 2 %
TARGET_SHARE_PCT = 90.0  # of the attainable; the Stop Condition of the skills, unless the user asks for another


@dataclass(frozen=True)
class Roof:
    """The limits a problem is held against: attainable (measured where it can be) and documented peak."""

    bandwidth: wiki.Row | None
    compute: wiki.Row | None
    peak_bandwidth: wiki.Row | None
    peak_compute: wiki.Row | None
    limit_compute: wiki.Row | None
    l2_capacity: wiki.Row | None

    @property
    def l2_bytes(self) -> float:
        """Capacity of the L2 in bytes; 0 when it is not known."""
        return self.l2_capacity.value * 2**20 if self.l2_capacity else 0

    def citations(self) -> list[str]:
        rows = (self.bandwidth, self.peak_bandwidth, self.compute, self.peak_compute, self.l2_capacity)
        return list(dict.fromkeys(row.citation for row in rows if row))


def roof(page: wiki.Page, dtype: str) -> Roof:
    """The roof of a product for arithmetic in `dtype`; absent values are None."""
    compute = COMPUTE_ROWS.get(dtype, ())
    documented = [name for name in compute if name.startswith("peak")]
    return Roof(
        bandwidth=_first(page, BANDWIDTH_ROWS),
        compute=_first(page, compute),
        peak_bandwidth=_first(page, ["memory_bandwidth"]),
        peak_compute=_first(page, documented),
        limit_compute=_first(page, LIMIT_ROWS.get(dtype, documented)),
        l2_capacity=_first(page, ["l2_capacity"]),
    )


def _first(page: wiki.Page, names) -> wiki.Row | None:
    """The first row that holds a value; UsageError when it is in a unit that these formulas do not take."""
    row = next((row for name in names if (row := page.known(name))), None)
    if row:
        unit = next((unit for word, unit in UNITS.items() if word in row.metric), "TFLOPS")
        if row.unit != unit:
            raise UsageError(f"{row.page}:{row.line}: {row.metric} must be given in {unit}, not {row.unit}")
    return row


def lacking(roof: Roof, flops: int, dtype: str) -> list[str]:
    """Wiki lines for the values without which this problem has no roof."""
    lines = []
    if roof.bandwidth is None:
        lines.append(wiki.missing("memory_bandwidth"))
    if flops and roof.compute is None:
        lines.append(wiki.missing((COMPUTE_ROWS.get(dtype) or (f"peak_{dtype}",))[-1]))
    return lines


def roof_for(page: wiki.Page, work: dict) -> Roof:
    """The roof of a product for a problem, {flops, dtype}; Refused when it has none, naming the values that the wiki lacks."""
    found = roof(page, work["dtype"])
    if gaps := lacking(found, work["flops"], work["dtype"]):
        raise Refused(f"no roofline for {page.platform}: " + "; ".join(gaps))
    return found


def bound(flops: int, bytes_min: int, roof: Roof) -> dict:
    """{arithmetic_intensity, ridge_point, bound, floor_us} of a problem.

    arithmetic_intensity and ridge_point in FLOP/byte. floor_us = max(bytes / bandwidth, FLOPs / compute):
    no version of this algorithm runs much faster.
    """
    memory_us = bytes_min / (roof.bandwidth.value * 1e9) * 1e6
    compute_us = flops / (roof.compute.value * 1e12) * 1e6 if flops else 0.0
    ridge = roof.compute.value * 1e12 / (roof.bandwidth.value * 1e9) if roof.compute else None
    return {
        "arithmetic_intensity": flops / bytes_min if bytes_min else None,
        "ridge_point": ridge,
        "bound": "compute" if compute_us > memory_us else "memory",
        "floor_us": max(memory_us, compute_us),
    }


def utilization(time_us: float, flops: int, bytes_min: int, roof: Roof) -> dict:
    """What a time means: rates, shares of the documented peaks, share of the floor (100 is the floor itself)."""
    limits = bound(flops, bytes_min, roof)
    tflops = flops / time_us / 1e6
    gbps = bytes_min / time_us / 1e3
    return {
        "tflops": tflops,
        "bandwidth_gbps": gbps,
        **limits,
        "tflops_peak_utilization_pct": 100 * tflops / roof.peak_compute.value if roof.peak_compute else None,
        "bandwidth_peak_utilization_pct": 100 * gbps / roof.peak_bandwidth.value if roof.peak_bandwidth else None,
        "floor_share_pct": 100 * limits["floor_us"] / time_us,
        "below_physical_limit": time_us < physical_limit_us(flops, bytes_min, roof),
    }


def beyond_floor(found: dict) -> str | None:
    """What to look into when a result of `utilization` beats the floor by more than its uncertainty: the floor is wrong, or
    the kernel. None of any other."""
    if found["floor_share_pct"] <= BEYOND_PCT:
        return None
    if found["bound"] == "memory":
        return (
            "beyond the floor: do the outputs need all bytes that were counted (estimate_work.py --bytes)? The floor's rate is "
            "a copy's, and this mix of reads and writes may have a better one: measure_bandwidth_ceiling.py"
        )
    return (
        "beyond the floor: do the outputs need all FLOPs that were counted (estimate_work.py --flops)? The floor's rate is one "
        "large product's under its power cap, and this card may do better: bench_matmul.py --size N"
    )


def physical_limit_us(flops: int, bytes_min: int, roof: Roof) -> float:
    """The time that the documented peaks forbid to beat.

    Laxer than the floor on purpose: honest kernels read more than they write, skip bytes that no output
    needs, and leave results in the L2. Who beats this one beats the hardware, or the work was counted wrong.
    """
    peak = roof.peak_bandwidth or roof.bandwidth
    rest = max(0, bytes_min - roof.l2_bytes)
    memory_us = rest / (peak.value * 1e9) * 1e6
    compute_us = flops / (roof.limit_compute.value * 1e12) * 1e6 if flops and roof.limit_compute else 0.0
    return max(memory_us, compute_us)


def fits_in_cache(bytes_min: int, roof: Roof) -> bool:
    """A problem so small that the bandwidth measured on large buffers says little about it."""
    return 0 < bytes_min <= roof.l2_bytes


def ceiling_target(ceiling_gbps: float, device: str, share_pct: float = TARGET_SHARE_PCT) -> dict:
    """The Stop Condition of the default workload, where its memory-bound floor is out of reach: `share_pct` of what this GPU's
    memory gave to a kernel that moves this problem's bytes and does no more."""
    ceiling = round(ceiling_gbps, 1)
    return {
        "workload": "default",
        "metric": "bandwidth_gbps",
        "target": round(share_pct / 100 * ceiling, 2),
        "unit": "GB/s",
        "share_pct": share_pct,
        "basis": f"ceiling of this problem: {ceiling} GB/s <- measure_bandwidth_ceiling.py, {device}",
    }


def target(workload: str, flops: int, bytes_min: int, roof: Roof, share_pct: float = TARGET_SHARE_PCT) -> dict:
    """The Stop Condition of a workload: `share_pct` of the attainable rate of whatever bounds it."""
    if bound(flops, bytes_min, roof)["bound"] == "compute":
        row, metric, unit = roof.compute, "tflops", "TFLOPS"
    else:
        row, metric, unit = roof.bandwidth, "bandwidth_gbps", "GB/s"
    return {
        "workload": workload,
        "metric": metric,
        "target": round(share_pct / 100 * row.value, 2),
        "unit": unit,
        "share_pct": share_pct,
        "basis": row.citation,
    }
