"""The diagnosis of a whole profile: class, findings, and how far the call is from its floor."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import bundle
from ..errors import Refused, ToolError
from ..hardware import roofline, wiki
from ..hardware.work import Work
from ..profilers import metrics
from ..profilers.profile import KernelProfile, Params, Profile
from . import amd, classify, findings, speed_of_light
from .case import Case
from .diagnosis import Diagnosis, Floor, Limits, summaries

# From this share of the least bytes on, a problem mostly reads, and may pass the rate of a copy (gpu-wiki, H200).
MOSTLY_READS = 0.75
RATES = {  # row of the wiki -> its name in a sentence
    "measured_copy_bandwidth": "the copy rate",
    "memory_bandwidth": "the documented bandwidth",
}


def diagnose(profile: Profile, earlier: Sequence[Profile] = (), platform: str | None = None) -> Diagnosis:
    """The diagnosis of a profile.

    earlier: profiles of the versions before, oldest first. platform: the AMD product, for its documented bandwidth.
    Refused when the wiki does not know the platform.
    """
    limits = metrics.thresholds()
    if profile.is_amd:
        row = wiki.product(platform).known("memory_bandwidth") if platform else None
        return amd.diagnose(profile, limits, row.value if row else None)
    bound = floor(profile)
    past = [speed_of_light.efficiency_pct(one.longest.metrics) for one in earlier]
    known = [efficiency for efficiency in past if efficiency is not None]
    light = speed_of_light.analyse(profile.longest.metrics, bound, known, limits)
    return replace(from_metrics(profile, limits, bound), speed_of_light=light)


def from_metrics(profile: Profile, limits: Limits, bound: Floor | None = None) -> Diagnosis:
    """The diagnosis without the speed of light. limits: the thresholds. bound: the floor of the call. Pure."""
    kernels = summaries(profile.kernels, [classify.classify(kernel.metrics, limits) for kernel in profile.kernels])
    main = profile.longest
    judged = kernels[profile.kernels.index(main)]
    case = Case(profile.kernels, main, judged.share_pct, profile.work, judged.classification, bound, limits)
    absent = {key for kernel in profile.kernels for key, value in kernel.metrics.items() if value is None}
    capability = metrics.capability(main.metrics)
    elsewhere = metrics.not_on(capability)
    return Diagnosis(
        kernels=kernels,
        longest=main.name,
        classification=judged.classification,
        metrics=main.metrics,
        missing_metrics=tuple(sorted(absent - elsewhere)),
        architecture=capability and f"sm_{capability.replace('.', '')}",
        not_on_architecture=tuple(sorted(absent & elsewhere)),
        findings=findings.of(case),
        second_opinion=main.rules,
        warnings=tuple(warnings(profile.kernels, main, limits)),
    )


# Kernels in a report of the wrong launch: torch's random numbers, fills and copies, and the trials of an autotuner.
BYSTANDERS = re.compile(r"distribution_\w*kernel|FillFunctor|copy_kernel|elementwise_kernel_with_index|[Mm]em(cpy|set)")


def warnings(kernels: Sequence[KernelProfile], main: KernelProfile, limits: Limits) -> list[str]:
    """Why this report may not be of the intended kernel. limits: the thresholds. Pure."""
    warned = []
    if BYSTANDERS.search(main.name):
        warned.append(
            f"the longest kernel, {main.name[:60]}, makes, fills or copies data: is this the kernel that was meant?"
        )
    most = limits["impossible_pct"]
    beyond = [key for key, value in main.metrics.items() if key.endswith("_throughput") and value and value > most]
    if beyond:
        warned.append(f"above {most} % of a peak: {', '.join(beyond)}; the passes of the profiler saw different runs")
    names = [kernel.name for kernel in kernels]
    if len(names) > len(set(names)):
        warned.append(
            "one kernel appears several times: launches of several calls, or an autotuner's trials, count together"
        )
    return warned


# --- the floor --------------------------------------------------------------------------------------------------------


def floor(profile: Profile) -> Floor | None:
    """The floor of the call. Its time is the recorded latency, else that of all kernels under the profiler. None where
    the work, the GPU or the time is unknown."""
    work, time_us = profile.work, profile.recorded_us or profile.total_us
    if not work or not profile.product or not time_us:
        return None
    try:
        roof = roofline.roof_for(profile.product, Work.from_json(work))
    except Refused:
        return None
    used = roofline.utilization(time_us, work["flops"], work["bytes_min"], roof)
    clock = "by the recorded latency" if profile.recorded_us else "by the profile's duration"
    sustained = roof.sustained_compute if used.bound == "compute" and not used.library_rate else None
    beside = f" ({100 * used.tflops / sustained.value:.1f} % of the rate that the card sustains)" if sustained else ""
    return Floor(
        share_pct=used.floor_share_pct,
        bound=used.bound,
        basis=f"at {rate(roof, used.bound, work)}, {clock}{beside}",
        library_rate=used.library_rate,
        peak_pct=used.tflops_peak_utilization_pct,
    )


def rate(roof: roofline.Roof, bound: str, work: dict) -> str:
    """ "the copy rate (this problem mostly reads, which can be faster)". No value: it would need a citation."""
    row = roof.bandwidth if bound == "memory" else roof.compute
    product = (
        "the measured ceiling of the tensor operations" if row.metric.startswith("measured") else "the documented peak"
    )
    if roofline.is_library_rate(row.metric):
        product = "a library's rate"
    reads = bound == "memory" and (work.get("bytes_in") or 0) >= MOSTLY_READS * work["bytes_min"]
    return RATES.get(row.metric, product) + " (this problem mostly reads, which can be faster)" * reads


def recorded_us(records: Path, params: Params | None) -> float | None:
    """The median latency in us that the folder `records` (W/memory) has of the kernel, workload and GPU of a profile;
    None where it has none of them."""
    path = records / f"{params.version}.json" if params else None
    if path is None or not path.is_file():
        return None
    with contextlib.suppress(ToolError, KeyError, TypeError):  # a record that cannot be read counts as absent
        record = bundle.read_json(path)
        if record["kernel_sha256"] == params.kernel_sha256 and record["device"] == params.device:
            return record["performance"]["latency_us_by_workload"].get(params.workload)
    return None
