"""The metric schema, the thresholds of the diagnosis and the units of metrics. Their data files are read here alone."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .. import bundle


@dataclass(frozen=True)
class Metric:
    """One row of reference/ncu_metrics.json."""

    section: str
    key: str
    label: str
    unit: str
    names: tuple[str, ...]
    better: str | None
    meaning: str
    details: tuple[str, ...] = ()  # (section, label) on Nsight Compute's details page, where it is shown there


@dataclass(frozen=True)
class Architectures:
    """Which GPU has which metric; reference/ncu_metrics.json explains the fields.

    chips: compute capability -> chip. own: beginnings of Nsight Compute's own names. with_sections: beginnings of names
    that only a section collects. only_on: name -> compute capabilities, for a name that not all chips have.
    last_version: compute capability -> last Nsight Compute that profiles it.
    """

    chips: dict[str, str]
    own: tuple[str, ...]
    with_sections: tuple[str, ...]
    only_on: dict[str, list[str]]
    last_version: dict[str, str]


@dataclass(frozen=True)
class RocprofMetric:
    """One metric of reference/rocprof_metrics.json: factor x sum(counters), over sum(of) where `of` names counters."""

    section: str
    key: str
    label: str
    unit: str
    meaning: str
    counters: tuple[str, ...]
    of: tuple[str, ...] = ()
    factor: float = 1


def schema() -> list[Metric]:
    """All metrics that are collected, in the order of the report."""
    rows = bundle.read_json(bundle.REFERENCE / "ncu_metrics.json")["metrics"]
    return [Metric(**{**row, **{key: tuple(row.get(key, ())) for key in ("names", "details")}}) for row in rows]


def names() -> list[str]:
    """Every name of every metric, each once."""
    return list(dict.fromkeys(name for metric in schema() for name in metric.names))


def requested() -> list[str]:
    """The names that ncu is requested to collect: all but those that only a section collects."""
    by_section = architectures().with_sections
    return [name for name in names() if not name.startswith(by_section)]


def values(collected: dict[str, tuple[object, str]]) -> dict[str, float | None]:
    """The value of every metric of the schema, by its key and in its unit; None where none was collected.

    collected: the profiler's name -> (value, its unit). The first of a metric's names that has a number counts.
    """
    by_key = {}
    for metric in schema():
        numbers = (converted(*collected[name], metric.unit) for name in metric.names if name in collected)
        by_key[metric.key] = next((number for number in numbers if number is not None), None)
    return by_key


# --- architectures: which GPU has which metric ----------------------------------------------------------------------


def architectures() -> Architectures:
    entry = bundle.read_json(bundle.REFERENCE / "ncu_metrics.json")["architectures"]
    return Architectures(
        chips=entry["chips"],
        own=tuple(entry["own"]),
        with_sections=tuple(entry["with_sections"]),
        only_on=entry["only_on"],
        last_version=entry["last_version"],
    )


def capability(values: Mapping[str, float | None]) -> str | None:
    """ "9.0", the compute capability among a kernel's metrics; None where it was not collected."""
    parts = [values.get(key) for key in ("compute_capability", "compute_capability_minor")]
    return None if None in parts else "{:.0f}.{:.0f}".format(*parts)


def of_capability(compute_capability: str | None) -> dict[str, float]:
    """The two metrics that `capability` reads, of "9.0"; {} of None."""
    major, _, minor = (compute_capability or "").partition(".")
    return {"compute_capability": float(major), "compute_capability_minor": float(minor)} if minor else {}


def not_on(compute_capability: str | None) -> set[str]:
    """Keys of the metrics that GPUs of this compute capability lack under every name; empty: unknown."""
    known = architectures()
    if compute_capability not in known.chips:
        return set()
    return {
        metric.key
        for metric in schema()
        if all(compute_capability not in known.only_on.get(name, [compute_capability]) for name in metric.names)
    }


def last_version(compute_capability: str) -> str | None:
    """ "2025.2", the last Nsight Compute that profiles GPUs of this compute capability; None where the newest does."""
    return architectures().last_version.get(compute_capability)


# --- units: Nsight Compute prints Kbyte/block, nsecond, Ghz; the schema has its own ----------------------------

SECONDS = {"": 0, "m": -3, "u": -6, "n": -9}
DECIMALS = {"K": 3, "M": 6, "G": 9, "T": 12}  # a Kbyte is 1000 bytes
DIMENSIONS = ("s", "byte", "byte/s", "hz")  # anything else is a plain count, whatever its name


def converted(value: object, given: str, wanted: str) -> float | None:
    """`value`, whose unit is `given`, in the unit `wanted`. None: not finite, or units of another dimension."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    (exponent, base), (wanted_exponent, wanted_base) = _unit(given), _unit(wanted)
    if base != wanted_base and (base in DIMENSIONS or wanted_base in DIMENSIONS):
        return None
    steps = exponent - wanted_exponent
    return value * 10.0**steps if steps else value


def _unit(unit: str) -> tuple[int, str]:
    """(power of ten, base unit): (3, "byte") of Kbyte/block, (12, "byte/s") of Mbyte/us, (-6, "s") of usecond."""
    over, _, under = unit.partition("/")
    (exponent, base), (under_exponent, under_base) = _prefixed(over), _prefixed(under)
    if under_base == "s":  # a rate; what is counted per block or per thread stays what it is
        return exponent - under_exponent, f"{base}/s"
    return exponent, base


def _prefixed(word: str) -> tuple[int, str]:
    if match := re.fullmatch("([mun]?)s(?:econd)?", word):
        return SECONDS[match[1]], "s"
    if match := re.fullmatch("([KMGT])([a-z]+)", word):
        return DECIMALS[match[1]], match[2]
    return 0, word


def ncu_sections() -> list[str]:
    """The Nsight Compute sections that are collected besides the single metrics."""
    return bundle.read_json(bundle.REFERENCE / "ncu_metrics.json")["sections"]


def rocprof() -> list[RocprofMetric]:
    """All metrics of AMD, in the order of the report."""
    rows = bundle.read_json(bundle.REFERENCE / "rocprof_metrics.json")["metrics"]
    return [
        RocprofMetric(
            *(row[name] for name in ("section", "key", "label", "unit", "meaning")),
            tuple(row["counters"]),
            tuple(row.get("of", ())),
            row.get("factor", 1),
        )
        for row in rows
    ]


def schema_of(keys: Iterable[str]) -> list[Metric] | list[RocprofMetric]:
    """The metrics of AMD where they hold all of these keys, or else those of Nsight Compute."""
    amd = rocprof()
    return amd if set(keys) <= {metric.key for metric in amd} else schema()


def thresholds() -> dict[str, float]:
    """Name -> value of every diagnosis threshold."""
    rows = bundle.read_json(bundle.REFERENCE / "thresholds.json")["thresholds"]
    return {name: row["value"] for name, row in rows.items()}
