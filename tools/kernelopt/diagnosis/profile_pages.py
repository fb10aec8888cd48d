"""The pages of a profile folder, in Markdown, all of it rendered from recorded data: report.md in the form that an orchestrating
agent expects, report-verbose.md, the timeline, the entry for a development log. Pure but for `write`."""

import textwrap
from pathlib import Path

from .. import bundle
from ..diagnosis import analysis, profile_folder
from ..diagnosis.analysis import total_us
from ..diagnosis.profile_folder import counter, evidence_text, finding_lines, main_metrics, number, origin, summary_line
from ..profilers import metrics
from ..session.workspace import Workspace

TOP = 3
WIDTH = 240  # characters of what a rule of NVIDIA's says; report-verbose.md has all of it
CHANGES = ("duration", "tensor_cycles", "dram_throughput", "achieved_occupancy", "registers_per_thread")


def write(folder: Path, mode: str, profile: dict, workspace: Workspace) -> tuple[dict, list[str]]:
    """The files of a mode that are made from its profile; (what the tool answers, the same in lines)."""
    bundle.write_json(folder / "params.json", profile["params"])
    if "timeline" in profile:
        bundle.write_json(folder / "timeline.json", profile["timeline"])
        bundle.write_text(folder / "report.md", timeline_page(profile))
        return {"timeline": profile["timeline"]}, [timeline_line(profile["timeline"])]
    bundle.write_json(folder / "metrics.json", {"kernels": profile["kernels"], "work": profile["work"]})
    earlier = profile_folder.earlier(workspace, profile["params"])
    recorded_us = analysis.recorded_us(workspace.memory, profile["params"])
    found = analysis.analysed({**profile, "recorded_us": recorded_us}, earlier)
    bundle.write_text(folder / "report.md", page(profile, found, profile_folder.parent(workspace, earlier)))
    if mode == "ncu" and (folder / "hotspots.json").is_file():
        hotspots = bundle.read_json(folder / "hotspots.json")
        bundle.write_text(folder / "report-verbose.md", verbose_page(profile, found, hotspots))
    return found, [summary_line(found)]


def page(profile: dict, found: dict, before: dict | None) -> str:
    """report.md; `before` is the earlier profile to compare with."""
    return "\n".join(
        [
            *summary(profile, found, before),
            "",
            "## Findings",
            "",
            *capped(found),
            *(line for finding in found["findings"] for line in finding_lines(finding)),
            *([] if found["findings"] else ["None: no rule fired on these counters."]),
            "",
            *second_opinion(found),
            "",
            "## Counters",
            "",
            *counters(profile, found, before),
            "",
            f"Asked for and not collected: {', '.join(found['missing_metrics']) or 'nothing'}.",
            *(
                [f"Not on {found['architecture']}: {', '.join(found['not_on_architecture'])}."]
                if found["not_on_architecture"]
                else []
            ),
            "",
        ]
    )


def capped(found: dict) -> list[str]:
    basis = found["speed_of_light"]["floor_basis"]
    return [f"No gain below goes beyond the floor {basis}.", ""] if basis and found["findings"] else []


def second_opinion(found: dict) -> list[str]:
    """What NVIDIA's rules say of the longest kernel, the largest estimate first."""
    rules = sorted(found["second_opinion"], key=lambda rule: -(rule["speedup_pct"] or 0))
    title = "## NVIDIA's rules, a second opinion"
    lines = [
        rule_line({**rule, "message": textwrap.shorten(rule["message"], WIDTH, placeholder=" …")}) for rule in rules
    ]
    return [title, "", *(lines or ["None spoke up."])]


def summary(profile: dict, found: dict, before: dict | None) -> list[str]:
    """The block for the orchestrating agent: configuration, stages, bottleneck, root cause, opportunities, change."""
    params = profile["params"]
    return [
        f"# Profile: {params['version']}",
        "",
        origin(params),
        "",
        *configuration(params),
        "",
        "## Stages",
        "",
        *stages(profile, found),
        "",
        f"## Bottleneck: {found['classification']['class']}",
        "",
        summary_line(found),
        "",
        f"Root cause: {root_cause(found)}",
        "",
        f"Stop? {'yes' if found['speed_of_light']['should_stop'] else 'no'}: {found['speed_of_light']['reason']}.",
        *(f"\nTake care: {warning}." for warning in found["warnings"]),
        "",
        f"## Top {TOP} opportunities",
        "",
        *opportunities(found),
        *(["", f"## Against {before['params']['version']}", "", *against(profile, found, before)] if before else []),
    ]


def configuration(params: dict) -> list[str]:
    names = ("workload", "shapes", "dtype", "cache", "clocks", "profiler")
    tuned = [
        (kernel["name"], kernel["autotuned"]["best"]) for kernel in params.get("triton", []) if kernel["autotuned"]
    ]
    rows = [*((name, params[name]) for name in names), *((f"autotuned {name}", best) for name, best in tuned)]
    return ["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def stages(profile: dict, found: dict) -> list[str]:
    lines = [
        "| kernel | duration us | share % | tensor % | DRAM % | occupancy % | class | limiter |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kernel, judged in zip(profile["kernels"], found["kernels"], strict=True):
        m = kernel["metrics"]
        values = (m[key] for key in ("tensor_cycles", "dram_throughput", "achieved_occupancy"))
        cells = [number(cell) for cell in (kernel["duration_us"], judged["share_pct"], *values)]
        lines.append(f"| `{kernel['name']}` | {' | '.join(cells)} | {judged['class']} | {judged['limiter'] or '-'} |")
    return lines


def root_cause(found: dict) -> str:
    """At most two sentences: what limits, and the first finding's inference, if that finding may gain anything."""
    judged = found["classification"]
    first = (
        f"{judged['limiter']} limits `{judged['of']}`."
        if judged["limiter"]
        else f"{judged['reasons'][0]}; no unit leads."
    )
    if not found["findings"] or found["findings"][0]["estimated_gain_pct"] == 0:
        return first
    inference = found["findings"][0]["inference"]
    return f"{first} {inference[0].upper()}{inference[1:]}."


def opportunities(found: dict) -> list[str]:
    """The best findings with the gain that they promise at most, and what triggered them."""
    lines = []
    for place, finding in enumerate(found["findings"][:TOP], start=1):
        gain = finding["estimated_gain_pct"]
        estimate = "gain unknown" if gain is None else f"at most {gain} % of the time"
        lines.append(
            f"{place}. {finding['id']}: {estimate}; trigger: {evidence_text(finding)}; {finding['actions'][0]}"
        )
    return lines or ["None: no rule fired on these counters."]


def against(profile: dict, found: dict, before: dict) -> list[str]:
    """The longest kernels of two versions side by side, and the whole call."""
    old = main_metrics(before)
    labels = {metric.key: metric for metric in metrics.schema()}
    rows = [("all kernels", "us", total_us(before), total_us(profile))]
    rows += [(labels[key].label, labels[key].unit, old.get(key), found["metrics"].get(key)) for key in CHANGES]
    lines = ["| | before | now | change |", "|---|---|---|---|"]
    return lines + [f"| {name} ({unit}) | {number(a)} | {number(b)} | {change(a, b)} |" for name, unit, a, b in rows]


def change(before: float | None, now: float | None) -> str:
    return "-" if before is None or now is None or not before else f"{100 * (now / before - 1):+.1f} %"


def counters(profile: dict, found: dict, before: dict | None) -> list[str]:
    """The counters of the longest kernel, beside those of the longest kernel of the version before."""
    main = found["metrics"]
    old = main_metrics(before) if before else None
    title = f" {before['params']['version']} |" if before else ""
    lines = [
        f"| section | counter | {profile['params']['version']} |{title} unit |",
        "|---|---|---|" + ("---|" if before else "") + "---|",
    ]
    for metric in metrics.schema():
        now, earlier = (counter(found, metric.key, values.get(metric.key)) for values in (main, old or {}))
        cells = [metric.section, metric.label, now, *([earlier] if old else []), metric.unit]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def devlog(profile: dict, found: dict, before: dict | None) -> str:
    """The entry for a development log: time, rates, occupancy, tensor pipe, against the version before."""
    params, work, time_us = profile["params"], profile["work"] or {}, total_us(profile)
    old = main_metrics(before) if before else {}
    old_us = total_us(before) if before else None
    rates = [
        ("Duration", "us", time_us, old_us),
        ("FLOPs of the problem", "TFLOPS", *(rate(work.get("flops"), us, 1e6) for us in (time_us, old_us))),
        ("Least bytes of the problem", "GB/s", *(rate(work.get("bytes_min"), us, 1e3) for us in (time_us, old_us))),
        ("Occupancy", "%", found["metrics"].get("achieved_occupancy"), old.get("achieved_occupancy")),
        ("Tensor pipe", "%", found["metrics"].get("tensor_cycles"), old.get("tensor_cycles")),
    ]
    return "\n".join(
        [
            f"**Performance of {params['version']}** ({params['device']}, clocks {params['clocks']}, {params['dtype']}, "
            f"{params['shapes']}, cache {params['cache']})",
            "",
            "| metric | value | against the version before |",
            "|---|---|---|",
            *(
                f"| {name} | {number(now)} {unit} | {change(then, now)} |"
                for name, unit, now, then in rates
                if now is not None
            ),
            "",
            f"**Bottleneck:** {summary_line(found)}",
            "",
            "**Open:**",
            *(f"- {finding['id']}: {finding['inference']}" for finding in found["findings"]),
            *(["- nothing that a rule found"] if not found["findings"] else []),
        ]
    )


def rate(amount: float | None, time_us: float | None, scale: float) -> float | None:
    return amount / time_us / scale if amount and time_us else None


def verbose_page(profile: dict, found: dict, hotspots: list[dict]) -> str:
    """report-verbose.md of mode ncu: hotspots, NVIDIA's rules, all counters of all kernels, what Triton compiled."""
    lines = [f"# All that was collected: {profile['params']['version']}", "", origin(profile["params"])]
    for kernel, spots in zip(profile["kernels"], hotspots, strict=True):
        lines += ["", f"## `{kernel['name']}`", "", "### Where the samples fall", "", *hotspot_table(spots["lines"])]
        lines += ["", "### NVIDIA's rules, a second opinion", "", *(rule_line(rule) for rule in kernel["rules"])]
        lines += ["", "### Counters", "", "| section | counter | value | unit | meaning |", "|---|---|---|---|---|"]
        for metric in metrics.schema():
            value = counter(found, metric.key, kernel["metrics"].get(metric.key))
            lines.append(f"| {metric.section} | {metric.label} | {value} | {metric.unit} | {metric.meaning} |")
    lines += ["", "## What Triton compiled", "", *compiled_lines(profile["params"].get("triton", []))]
    return "\n".join(lines) + "\n"


def hotspot_table(spots: list[dict]) -> list[str]:
    rows = [
        f"| {number(spot['share_pct'])} | {spot['stall'] or '-'} | {Path(spot['file'] or '?').name}:{spot['line']} | `{spot['text'] or '?'}` | "
        f"{spot['excess_sectors']} |"
        for spot in spots
    ]
    return ["| samples % | waits for | line | source | excess sectors |", "|---|---|---|---|---|", *rows]


def rule_line(rule: dict) -> str:
    speedup = "" if rule["speedup_pct"] is None else f" (NVIDIA estimates {rule['speedup_pct']:.1f} %)"
    return f"- **{rule['name']}**{speedup}: {rule['message']}"


def compiled_lines(kernels: list[dict]) -> list[str]:
    lines = []
    for kernel in kernels:
        if kernel["compiled"] is None:
            lines.append(
                f"- `{kernel['name']}`: registers and spills are not known; this version of Triton does not show them"
            )
        for one in kernel["compiled"] or []:
            lines.append(
                f"- `{kernel['name']}`: {one['registers']} registers, {one['spills']} spills, {one['shared_bytes']} bytes shared, "
                f"{one['num_warps']} warps, {one['num_stages']} stages; {', '.join(one['files'])}"
            )
        if kernel["autotuned"]:
            lines.append(f"- `{kernel['name']}` autotuned to {kernel['autotuned']['best']}")
            lines += [
                f"  - {trial['config']}: {number(min(trial['times_us'], default=None))} us"
                for trial in kernel["autotuned"]["trials"]
            ]
    return lines or [
        "Nothing: " + ("no Triton kernel of the file ran." if kernels else "the kernel's file holds no Triton kernels.")
    ]


def timeline_page(profile: dict) -> str:
    """report.md of the modes event and nsys."""
    found, params = profile["timeline"], profile["params"]
    rows = [
        f"| `{stage['name'][:60]}` | {stage['launches']:g} | {number(stage['us'])} | {number(stage['share_pct'])} | {stage['stream']} "
        f"| {stage['grid']} | {stage['block']} | {stage['registers']} |"
        for stage in found["stages"]
    ]
    return "\n".join(
        [
            f"# Timeline: {params['version']}",
            "",
            origin(params),
            "",
            *configuration(params),
            "",
            timeline_line(found),
            "",
            "## Stages",
            "",
            "| kernel | launches | us | share % | stream | grid | block | registers |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "## Pauses between kernels",
            "",
            *(
                f"- {number(gap['us'])} us between `{gap['after'][:50]}` and `{gap['before'][:50]}`"
                for gap in found["gaps"]
            ),
            *(["None of 1 us or more."] if not found["gaps"] else []),
            "",
            "## The host's calls, per call of the kernel",
            "",
            *(f"- {cost['name']}: {cost['count']:g} times, {number(cost['us'])} us" for cost in found["api"]),
            "",
        ]
    )


def timeline_line(found: dict) -> str:
    return (
        f"{number(found['span_us'])} us a call from the first kernel to the end of the last, median of {found['calls']}; "
        f"the GPU idles {number(found['idle_pct'])} % of that; {found['streams']} streams, {number(found['overlap_us'])} us overlap"
    )
