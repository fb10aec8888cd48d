"""Profiles in every form that is known here, told apart by what they are, and analysed."""

from pathlib import Path

from ..hardware import wiki
from ..profilers import metrics, ncu_csv, rocprof
from ..session.workspace import Workspace
from . import analysis, classify, profile_folder


def load(path: Path, workspace: Workspace | None = None) -> dict:
    """The profile {kernels, work, params} of a folder of ours, a .ncu-rep or a CSV of Nsight Compute; of rocprofv3's output with
    {invalid, origin}."""
    if is_rocprof(path):
        return rocprof.read(path)
    if path.suffix == ".csv" and path.is_file():
        return {"kernels": ncu_csv.read(path), "work": None, "params": None}
    return profile_folder.load(path, workspace)


def analysed(profile: dict, earlier: list[dict], platform: str | None) -> dict:
    """The analysis of a profile. earlier: profiles of the versions before (profile_analysis.analysed). platform: the AMD product,
    whose documented bandwidth the DRAM traffic is held against."""
    return of_rocprof(profile, platform) if "invalid" in profile else analysis.analysed(profile, earlier)


def is_rocprof(path: Path) -> bool:
    """rocprofv3 writes rocpd databases, or CSVs that name the dispatch of each kernel."""
    if path.is_dir():
        ours = any(path.glob("*.ncu-rep")) or (path / "metrics.json").exists()
        return not ours and any(map(is_rocprof, (*path.rglob("*.db"), *path.rglob("*.csv"))))
    if path.suffix == ".db":
        return path.is_file()
    if path.suffix != ".csv" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return "dispatch_id" in file.readline().lower()


def of_rocprof(profile: dict, platform: str | None) -> dict:
    """The analysis of an AMD profile, in the shape of diagnosis.analyse; there are no findings for AMD yet."""
    limits, bandwidth = metrics.thresholds(), None
    if platform:
        row = wiki.product(platform).known("memory_bandwidth")
        bandwidth = row.value if row else None
    kernels = classify.shares(profile["kernels"])
    judged = [rocprof.classify(kernel["metrics"], limits, bandwidth) for kernel in kernels]
    place = max(range(len(kernels)), key=lambda at: kernels[at]["duration_us"] or 0)
    shown = ("name", "share_pct", "duration_us")
    return {
        "kernels": [
            {**{name: kernel[name] for name in shown}, "class": found["class"], "limiter": found["limiter"]}
            for kernel, found in zip(kernels, judged, strict=True)
        ],
        "classification": {"of": kernels[place]["name"], **judged[place]},
        "metrics": kernels[place]["metrics"],
        "missing_metrics": sorted({key for k in kernels for key, value in k["metrics"].items() if value is None}),
        "architecture": None,
        "not_on_architecture": [],
        "findings": [],
        "second_opinion": [],
        "warnings": [
            f"{doubt['kernel']}: {', '.join(doubt['counters'])}: {doubt['reason']}" for doubt in profile["invalid"]
        ],
    }
