"""The pages of a profile folder in Markdown: report.md for an orchestrating agent, report-verbose.md, the timeline,
the entry for a development log. Pure except `write`."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import bundle
from ..profilers import collect, metrics
from ..profilers.ncu_source import SourceLine
from ..profilers.profile import Metrics, NvidiaRule, Params, Profile
from ..profilers.timeline import Timeline
from ..session.workspace import Workspace
from . import analysis, profile_folder, text
from .diagnosis import Diagnosis
from .text import finding_lines, metric_value, number, origin, summary_line

TOP = 3
WIDTH = 240  # characters of a message of NVIDIA's rules; report-verbose.md has all of it
NO_FINDING = "None: no rule fired on these metrics."
CHANGES = ("duration", "tensor_cycles", "dram_throughput", "achieved_occupancy", "registers_per_thread")


@dataclass(frozen=True)
class Written:
    """The result on the pages: a diagnosis of metrics, or the timeline of the modes event and nsys."""

    diagnosis: Diagnosis | None = None
    timeline: Timeline | None = None

    def to_json(self) -> dict:
        """The output of profile_kernel.sh --json, without the folder."""
        return {"timeline": self.timeline.to_json()} if self.timeline else self.diagnosis.to_json()

    def describe(self) -> str:
        """One line."""
        return timeline_line(self.timeline) if self.timeline else summary_line(self.diagnosis)


def write(folder: Path, mode: str, profile: Profile, workspace: Workspace) -> Written:
    """Write the files of a mode that are made from its profile."""
    bundle.write_json(folder / "params.json", profile.params.to_json())
    if profile.timeline:
        bundle.write_json(folder / "timeline.json", profile.timeline.to_json())
        bundle.write_text(folder / "report.md", timeline_page(profile.timeline, profile))
        return Written(timeline=profile.timeline)
    bundle.write_json(folder / "metrics.json", profile.to_json())
    earlier = profile_folder.earlier(workspace, profile.params)
    profile = profile_folder.with_session(profile, workspace, None, folder)
    diagnosis = analysis.diagnose(profile, earlier)
    bundle.write_text(folder / "report.md", page(profile, diagnosis, profile_folder.parent(workspace, earlier)))
    if mode == "ncu" and (folder / "hotspots.json").is_file():
        hotspots = collect.read_hotspots(folder)
        bundle.write_text(folder / "report-verbose.md", verbose_page(profile, diagnosis, hotspots))
    return Written(diagnosis)


def page(profile: Profile, diagnosis: Diagnosis, before: Profile | None) -> str:
    """report.md. before: the earlier profile to compare with."""
    absent, elsewhere = ", ".join(diagnosis.missing_metrics), ", ".join(diagnosis.not_on_architecture)
    return "\n".join(
        [
            *summary(profile, diagnosis, before),
            "",
            "## Findings",
            "",
            *capped(diagnosis),
            *(line for finding in diagnosis.findings for line in finding_lines(finding)),
            *([] if diagnosis.findings else [NO_FINDING]),
            "",
            *second_opinion(diagnosis),
            "",
            "## Metrics",
            "",
            *metric_table(profile, diagnosis, before),
            "",
            f"Not collected: {absent or 'nothing'}.",
            *([f"Not on {diagnosis.architecture}: {elsewhere}."] if elsewhere else []),
            "",
        ]
    )


def capped(diagnosis: Diagnosis) -> list[str]:
    light = diagnosis.speed_of_light
    if not light.floor_basis or not diagnosis.findings:
        return []
    if light.library_rate:
        return ["No gain below goes beyond the documented peak; a library's rate is no floor (measure_ceiling.py).", ""]
    return [f"No gain below goes beyond the floor {light.floor_basis}.", ""]


def second_opinion(diagnosis: Diagnosis) -> list[str]:
    """NVIDIA's rules on the longest kernel, the largest estimate first."""
    rules = sorted(diagnosis.second_opinion, key=lambda rule: -(rule.speedup_pct or 0))
    lines = [
        rule_line(replace(rule, message=textwrap.shorten(rule.message, WIDTH, placeholder=" …"))) for rule in rules
    ]
    return ["## NVIDIA's rules, a second opinion", "", *(lines or ["None fired."])]


def summary(profile: Profile, diagnosis: Diagnosis, before: Profile | None) -> list[str]:
    """The block for the orchestrating agent: configuration, stages, bottleneck, root cause, opportunities, change."""
    light = diagnosis.speed_of_light
    comparison = []
    if before:
        comparison = ["", f"## Against {before.params.version}", "", *against(profile, diagnosis, before)]
    return [
        f"# Profile: {profile.params.version}",
        "",
        origin(profile),
        "",
        *configuration(profile.params),
        "",
        "## Stages",
        "",
        *stages(profile, diagnosis),
        "",
        f"## Bottleneck: {diagnosis.classification.bottleneck}",
        "",
        summary_line(diagnosis),
        "",
        f"Root cause: {root_cause(diagnosis)}",
        "",
        f"Stop? {'yes' if light.should_stop else 'no'}: {light.reason}.",
        *(f"\nTake care: {warning}." for warning in diagnosis.warnings),
        "",
        f"## Top {TOP} opportunities",
        "",
        *opportunities(diagnosis),
        *comparison,
    ]


def configuration(params: Params) -> list[str]:
    names = ("workload", "shapes", "dtype", "cache", "clocks", "profiler")
    tuned = [(kernel["name"], kernel["autotuned"]["best"]) for kernel in params.triton if kernel["autotuned"]]
    rows = [*((name, getattr(params, name)) for name in names), *((f"autotuned {name}", best) for name, best in tuned)]
    return ["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def stages(profile: Profile, diagnosis: Diagnosis) -> list[str]:
    lines = [
        "| kernel | duration us | share % | tensor % | DRAM % | occupancy % | class | limiter |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kernel, judged in zip(profile.kernels, diagnosis.kernels, strict=True):
        m, of = kernel.metrics, judged.classification
        values = (m[key] for key in ("tensor_cycles", "dram_throughput", "achieved_occupancy"))
        cells = [number(cell) for cell in (kernel.duration_us, judged.share_pct, *values)]
        lines.append(f"| `{kernel.name}` | {' | '.join(cells)} | {of.bottleneck} | {of.limiter or '-'} |")
    return lines


def root_cause(diagnosis: Diagnosis) -> str:
    """At most two sentences: the limiter, and the inference of the first finding if that may gain anything."""
    judged = diagnosis.classification
    first = f"{judged.reasons[0]}; no unit leads."
    if judged.limiter:
        first = f"{judged.limiter} limits `{diagnosis.longest}`."
    if not diagnosis.findings or diagnosis.findings[0].estimated_gain_pct == 0:
        return first
    inference = diagnosis.findings[0].inference
    return f"{first} {inference[0].upper()}{inference[1:]}."


def opportunities(diagnosis: Diagnosis) -> list[str]:
    """The top findings, each with the upper bound of its gain and its evidence."""
    lines = [
        f"{place}. {finding.id}: {text.gain(finding)}; trigger: {text.evidence(finding)}; {finding.actions[0]}"
        for place, finding in enumerate(diagnosis.findings[:TOP], start=1)
    ]
    return lines or [NO_FINDING]


def against(profile: Profile, diagnosis: Diagnosis, before: Profile) -> list[str]:
    """The longest kernels of two versions side by side, and the whole call."""
    old = before.longest.metrics
    labels = {metric.key: metric for metric in metrics.schema()}
    rows = [("all kernels", "us", before.total_us, profile.total_us)]
    rows += [(labels[key].label, labels[key].unit, old.get(key), diagnosis.metrics.get(key)) for key in CHANGES]
    lines = ["| | before | now | change |", "|---|---|---|---|"]
    return lines + [f"| {name} ({unit}) | {number(a)} | {number(b)} | {change(a, b)} |" for name, unit, a, b in rows]


def change(before: float | None, now: float | None) -> str:
    return "-" if before is None or now is None or not before else f"{100 * (now / before - 1):+.1f} %"


def metric_table(profile: Profile, diagnosis: Diagnosis, before: Profile | None) -> list[str]:
    """The metrics of the longest kernel, beside those of the longest kernel of the version before."""
    old: Metrics = before.longest.metrics if before else {}
    title = f" {before.params.version} |" if before else ""
    lines = [
        f"| section | metric | {profile.params.version} |{title} unit |",
        "|---|---|---|" + ("---|" if before else "") + "---|",
    ]
    for metric in metrics.schema():
        now, then = (metric_value(diagnosis, metric.key, values.get(metric.key)) for values in (diagnosis.metrics, old))
        cells = [metric.section, metric.label, now, *([then] if before else []), metric.unit]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def devlog(profile: Profile, diagnosis: Diagnosis, before: Profile | None) -> str:
    """The entry for a development log: time, rates, occupancy, tensor pipe, against the version before."""
    params = profile.params
    return "\n".join(
        [
            f"**Performance of {params.version}** ({params.device}, clocks {params.clocks}, {params.dtype}, "
            f"{params.shapes}, cache {params.cache})",
            "",
            "| metric | value | against the version before |",
            "|---|---|---|",
            *devlog_rows(profile, diagnosis, before),
            "",
            f"**Bottleneck:** {summary_line(diagnosis)}",
            "",
            "**Open:**",
            *(f"- {finding.id}: {finding.inference}" for finding in diagnosis.findings),
            *(["- nothing: no rule fired"] if not diagnosis.findings else []),
        ]
    )


def devlog_rows(profile: Profile, diagnosis: Diagnosis, before: Profile | None) -> list[str]:
    work, now = profile.work or {}, diagnosis.metrics
    old: Metrics = before.longest.metrics if before else {}
    times = profile.total_us, before.total_us if before else None
    rows = [
        ("Duration", "us", *times),
        ("FLOPs of the problem", "TFLOPS", *(rate(work.get("flops"), us, 1e6) for us in times)),
        ("Least bytes of the problem", "GB/s", *(rate(work.get("bytes_min"), us, 1e3) for us in times)),
        ("Occupancy", "%", now.get("achieved_occupancy"), old.get("achieved_occupancy")),
        ("Tensor pipe", "%", now.get("tensor_cycles"), old.get("tensor_cycles")),
    ]
    known = [row for row in rows if row[2] is not None]
    return [f"| {name} | {number(value)} {unit} | {change(then, value)} |" for name, unit, value, then in known]


def rate(amount: float | None, time_us: float | None, scale: float) -> float | None:
    return amount / time_us / scale if amount and time_us else None


def verbose_page(profile: Profile, diagnosis: Diagnosis, hotspots: Sequence[Sequence[SourceLine]]) -> str:
    """report-verbose.md of mode ncu: hotspots, NVIDIA's rules, all metrics of all kernels, what Triton compiled."""
    lines = [f"# All that was collected: {profile.params.version}", "", origin(profile)]
    for kernel, spots in zip(profile.kernels, hotspots, strict=True):
        lines += ["", f"## `{kernel.name}`", "", "### Where the samples fall", "", *hotspot_table(spots)]
        lines += ["", "### NVIDIA's rules, a second opinion", "", *(rule_line(rule) for rule in kernel.rules)]
        lines += ["", "### Metrics", "", "| section | metric | value | unit | meaning |", "|---|---|---|---|---|"]
        for metric in metrics.schema():
            value = metric_value(diagnosis, metric.key, kernel.metrics.get(metric.key))
            lines.append(f"| {metric.section} | {metric.label} | {value} | {metric.unit} | {metric.meaning} |")
    lines += ["", "## What Triton compiled", "", *compiled_lines(profile.params.triton)]
    return "\n".join(lines) + "\n"


def hotspot_table(spots: Sequence[SourceLine]) -> list[str]:
    rows = [
        f"| {number(spot.share_pct)} | {spot.stall or '-'} | {Path(spot.file or '?').name}:{spot.line} "
        f"| `{spot.text or '?'}` | {spot.excess_sectors} |"
        for spot in spots
    ]
    return ["| samples % | waits for | line | source | excess sectors |", "|---|---|---|---|---|", *rows]


def rule_line(rule: NvidiaRule) -> str:
    speedup = "" if rule.speedup_pct is None else f" (NVIDIA estimates {rule.speedup_pct:.1f} %)"
    return f"- **{rule.name}**{speedup}: {rule.message}"


def compiled_lines(kernels: Sequence[dict]) -> list[str]:
    """kernels: {name, compiled, autotuned} of each Triton kernel of the file, as params.json has them."""
    if not kernels:
        return ["Nothing: the kernel's file holds no Triton kernels."]
    lines = [line for kernel in kernels for line in (*variants_of(kernel), *trials_of(kernel))]
    return lines or ["Nothing: no Triton kernel of the file ran."]


def variants_of(kernel: dict) -> list[str]:
    if kernel["compiled"] is None:
        return [f"- `{kernel['name']}`: registers and spills are not known; this version of Triton does not show them"]
    return [
        f"- `{kernel['name']}`: {one['registers']} registers, {one['spills']} spills, {one['shared_bytes']} bytes "
        f"shared, {one['num_warps']} warps, {one['num_stages']} stages; {', '.join(one['files'])}"
        for one in kernel["compiled"]
    ]


def trials_of(kernel: dict) -> list[str]:
    """The autotuner's choice and its trials, each by its shortest time."""
    if not kernel["autotuned"]:
        return []
    trials = kernel["autotuned"]["trials"]
    return [
        f"- `{kernel['name']}` autotuned to {kernel['autotuned']['best']}",
        *(f"  - {trial['config']}: {number(min(trial['times_us'], default=None))} us" for trial in trials),
    ]


def timeline_page(timeline: Timeline, profile: Profile) -> str:
    """report.md of the modes event and nsys."""
    return "\n".join(
        [
            f"# Timeline: {profile.params.version}",
            "",
            origin(profile),
            "",
            *configuration(profile.params),
            "",
            timeline_line(timeline),
            "",
            "## Stages",
            "",
            *stage_table(timeline),
            "",
            "## Pauses between kernels",
            "",
            *(f"- {number(gap.us)} us between `{gap.after[:50]}` and `{gap.before[:50]}`" for gap in timeline.gaps),
            *(["None of 1 us or more."] if not timeline.gaps else []),
            "",
            "## The host's calls, per call of the kernel",
            "",
            *(f"- {cost.name}: {cost.count:g} times, {number(cost.us)} us" for cost in timeline.api),
            "",
        ]
    )


def stage_table(timeline: Timeline) -> list[str]:
    rows = [
        f"| `{stage.name[:60]}` | {stage.launches:g} | {number(stage.us)} | {number(stage.share_pct)} | {stage.stream} "
        f"| {stage.grid} | {stage.block} | {stage.registers} |"
        for stage in timeline.stages
    ]
    return [
        "| kernel | launches | us | share % | stream | grid | block | registers |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def timeline_line(timeline: Timeline) -> str:
    return (
        f"{number(timeline.span_us)} us a call from the first kernel to the end of the last, median of "
        f"{timeline.calls}; the GPU idles {number(timeline.idle_pct)} % of that; {timeline.streams} streams, "
        f"{number(timeline.overlap_us)} us overlap"
    )
