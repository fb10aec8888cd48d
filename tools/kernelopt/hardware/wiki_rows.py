"""What the names of the wiki's rows fix: the unit of a row, and the rows that follow from others. Pure functions."""

import re
from collections.abc import Mapping

# The first pattern that matches a row's name; other rows choose their units.
UNIT_OF = {
    r"compute_capability": "-",
    r"sm_count": "SM",
    r"cu_count": "CU",
    r"(peak|measured)_int8_.*": "TOPS",
    r"peak_.*|measured_.*_(matmul|ceiling)(_sustained|_burst)?": "TFLOPS",
    r".*_bandwidth(_highest)?": "GB/s",
    r".*_clock(_tensor)?": "MHz",
    r"memory_bus_width": "bit",
    r"memory_capacity": "GB",
    r".*_capacity": "MB",
    r"tdp(_lowest)?": "W",
}


def unit_of(metric: str) -> str | None:
    """Return the unit that a row's name requires, or None if it requires none."""
    return next((unit for name, unit in UNIT_OF.items() if re.fullmatch(name, metric)), None)


def derived(values: Mapping[str, int | float | str]) -> dict[str, tuple[float, str]]:
    """Return {metric: (value in the unit of its row, formula)} of what follows from these values of a page.

    The memory makes two transfers a clock over its bus; a lane makes one fused multiply-add (2 FLOP) a clock.
    """
    found = {}
    if {"memory_clock", "memory_bus_width"} <= values.keys():
        rate = values["memory_clock"] * 2 * values["memory_bus_width"] / 8 / 1000
        found["memory_bandwidth"] = rate, "memory_clock x 2 x memory_bus_width"
    if {"sm_count", "fp32_lanes_per_sm", "boost_clock"} <= values.keys():
        peak = values["sm_count"] * values["fp32_lanes_per_sm"] * 2 * values["boost_clock"] / 1e6
        found["peak_fp32"] = peak, "sm_count x fp32_lanes_per_sm x 2 x boost_clock"
    return found
