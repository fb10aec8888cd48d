"""Units of hardware figures, as people write them: which belong together, and when two figures are equal. Pure."""

import math
import re

RATES = {
    f"{prefix}{word}": factor
    for prefixes, factor in ((("MB", "megabytes"), 1e-3), (("GB", "gigabytes"), 1.0), (("TB", "terabytes"), 1e3))
    for prefix in prefixes
    for word in ("/s", "ps", "/sec", " per second")
} | {"GiB/s": 1.073741824, "TiB/s": 1099.511627776}
FLOPS = {
    f"{prefix}{word}": factor
    for prefixes, factor in ((("G", "giga"), 1e-3), (("T", "tera"), 1.0), (("P", "peta"), 1e3))
    for prefix in prefixes
    for word in ("FLOPS", "FLOP/s", "FLOPs/s", "FLOPS/s")
}
OPS = {f"{prefix}{word}": factor for prefix, factor in (("T", 1.0), ("P", 1e3)) for word in ("OPS", "OP/s")}
CLOCKS = {"MHz": 1.0, "GHz": 1e3}
POWER = {"W": 1.0, "kW": 1e3, "watts": 1.0}
SIZES = {"bytes": 1.0, "KB": 1e3, "KiB": 1e3, "MB": 1e6, "MiB": 1e6, "GB": 1e9, "GiB": 1e9}
MULTIPROCESSORS = {"SM": 1.0, "SMs": 1.0, "streaming multiprocessors": 1.0, "multiprocessors": 1.0}
COMPUTE_UNITS = {"CU": 1.0, "CUs": 1.0, "compute units": 1.0}
ANY_CASE = (RATES, FLOPS, OPS, CLOCKS)
# Units that only hardware has; a figure with one of them is a hardware figure, wherever it stands.
HARDWARE_UNITS = (*ANY_CASE, POWER, MULTIPROCESSORS, COMPUTE_UNITS)
EXACT = 1e-6  # two floats of one figure
SPELLINGS = {unit.lower(): unit for table in ANY_CASE for unit in table}


def either(tables) -> str:
    """A pattern for the units of `tables`, longest first."""
    return "|".join(sorted((re.escape(unit) for table in tables for unit in table), key=len, reverse=True))


def number(text: str) -> float | None:
    """1979.5 for "1,979.5"; None for anything else."""
    plain = text.replace(",", "")
    return float(plain) if re.fullmatch(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", plain) else None


def table_of(unit: str) -> dict[str, float] | None:
    """The units that `unit` can be converted into; None for a unit of its own (threads, bit)."""
    return next((table for table in (*HARDWARE_UNITS, SIZES) if canonical(unit) in table), None)


def canonical(unit: str) -> str:
    """The spelling of the tables: TFLOPS for "Tflops"."""
    return SPELLINGS.get(unit.lower(), unit)


def convertible(unit: str, other: str) -> bool:
    table = table_of(other)
    return (table is not None and canonical(unit) in table) or unit.rstrip("s") == other.rstrip("s")


def equal(value: float, unit: str, other: float, other_unit: str, within: float = EXACT) -> bool:
    """Are two figures in convertible units the same, or so close by their larger one? Sizes may count 1000 or 1024 to the step."""
    if unit.rstrip("s") == other_unit.rstrip("s"):
        return close(value, other, within)
    table = table_of(other_unit)
    ratio = table[canonical(unit)] / table[canonical(other_unit)]
    steps = round(abs(math.log(ratio, 1000))) if table is SIZES else 0
    binary = 1.024 ** (steps if ratio > 1 else -steps)
    return close(value * ratio, other, within) or close(value * ratio * binary, other, within)


def close(a: float, b: float, within: float) -> bool:
    return abs(a - b) <= within * max(abs(a), abs(b))
