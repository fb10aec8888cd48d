"""The profiler's metric schema and the diagnosis thresholds: data files, read here and nowhere else."""

from dataclasses import dataclass

from . import bundle


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


def schema() -> list[Metric]:
    """All metrics that are collected, in the order of the report."""
    rows = bundle.read_json(bundle.REFERENCE / "ncu_metrics.json")["metrics"]
    return [Metric(**{**row, "names": tuple(row["names"])}) for row in rows]


def ncu_sections() -> list[str]:
    """The Nsight Compute sections that are collected besides the single metrics."""
    return bundle.read_json(bundle.REFERENCE / "ncu_metrics.json")["sections"]


def thresholds() -> dict[str, float]:
    """Name -> value of every diagnosis threshold."""
    rows = bundle.read_json(bundle.REFERENCE / "thresholds.json")["thresholds"]
    return {name: row["value"] for name, row in rows.items()}
