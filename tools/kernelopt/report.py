"""The report of a workspace: what was asked, what was reached, every round with its evidence, and what remains.

Pure: sessions.py reads the workspace, `page` makes a document out of what it found (document.py). Nothing is computed that no file
recorded, but for the products and differences that say so.
"""

import difflib
import itertools
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from . import gate, plots, profile_analysis, profile_report
from .citations import CITATION
from .document import Citations, Code, Facts, Figure, Fold, Link, Name, Page, Section, Table, Text
from .profile_report import number
from .roofline import TARGET_SHARE_PCT, Roof
from .sessions import Session
from .workspace import version_number

TOP = 3  # findings shown of the best version's profile
GREATEST = 2  # steps told in the summary
LINE, CELL = 160, 90  # characters of an action and of a row of evidence on one line; the fold of a round has all
WIDE_PCT = 5  # p20 to p80 over the median; the calls of most kernels stay within 3 %
LESSONS = "lessons.md"  # what a person or an agent wrote about the session, beside the report
UNKNOWN = "UNKNOWN"
NOT_RECORDED = "not recorded"
NOT_PROFILED = "not profiled"
# lines of an unattended run that stand elsewhere in the report
RECORDED = ("accepted", "rejected", "diverged", "stop", "final")
MOST_LINES = 40  # of the others, the latest
KEY = "● accepted, × rejected, □ not judged"  # of the plots' marks


# --- verdicts in words --------------------------------------------------------------------------------------------


def verdict(record: dict) -> str:
    result = record["quality_gate"]["result"]
    return "not judged" if result is None else "accepted" if result == "PASS" else "rejected"


def verdict_line(record: dict) -> str:
    """The verdict with its reason."""
    performance, gated = record["performance"], record["quality_gate"]
    compared = performance["comparison_with_previous"]
    reason = gated["failure_reason"] or (compared["verdict"] if compared else None)
    if verdict(record) == "accepted" and reason is None:
        reason = "the first version"
    return f"{verdict(record)}: {reason}" if reason else verdict(record)


def latency(record: dict) -> str:
    """ "262.46 us (p20 261.63 to p80 263.78)": the median first."""
    performance = record["performance"]
    if performance["latency_us"] is None:
        return NOT_RECORDED
    low, high = performance["p20_us"], performance["p80_us"]
    between = f" (p20 {low:.2f} to p80 {high:.2f})" if low is not None and high is not None else ""
    return f"{performance['latency_us']:.2f} us{between}"


def ratio(point: float, ends: Sequence[float]) -> str:
    return f"{point:.3f}x (95 % interval {ends[0]:.3f} to {ends[1]:.3f})"


def gain(record: dict) -> str:
    compared = record["performance"]["comparison_with_previous"]
    if compared is None:
        return "not compared"
    return f"{ratio(compared['speedup'], compared['ci95'])} against {compared['against']}"


def share_of_floor(record: dict) -> str:
    """By the measured median. The profiler's own time gives another one, which is named as its."""
    share = record["performance"]["floor_share_pct"]
    return NOT_RECORDED if share is None else f"{share:.1f} %"


def change_words(record: dict) -> str:
    change = record["optimization"]
    return change["action_description"] or change["action_category"] or NOT_RECORDED


def one_line(words: str, width: int = LINE) -> str:
    """Whole words of a text, as many as fit; a text with a citation is left as it is, for a cut one would hold no more."""
    if CITATION.search(words):
        return words
    return textwrap.shorten(words, width, placeholder=" …")


def evidence(session: Session, record: dict) -> str:
    """What the plan of a round gives as its evidence, in short: source and finding of each row."""
    rows = session.plans.get(record["version"])
    if rows is None:
        return no_evidence(record)
    at = rows[0].index("finding") if "finding" in rows[0] else len(rows[0]) - 1
    return "; ".join(one_line(": ".join(dict.fromkeys((row[0], row[at]))), CELL) for row in rows[1:])


def no_evidence(record: dict) -> str:
    version = record["version"]
    return "none, it is the baseline" if version == "v0" else f"none in plans/{version}_plan.md"


def profile_before(session: Session, record: dict) -> tuple[str, str]:
    """What the gate found in the profile of the version that a round started from, whether or not the plan used it."""
    before, found = parent(session, record), record["profile_evidence"]
    parts = [part for part in (found["tool_used"], found["bottleneck_type"], found["evidence_summary"]) if part]
    if found["evidence_chain"]:
        parts.append(f"its first finding: {found['evidence_chain'].replace(' -> ', ' → ')}")
    name = before["version"] if before else "the version before"
    return f"Profile of {name} said", "; ".join(parts) or f"nothing: {NOT_PROFILED}"


def chain(records: list[dict], best: dict) -> tuple[list[dict], str]:
    """(records from the best down to the one that was compared with v0, why the chain breaks or "")."""
    by_version, found, at = {record["version"]: record for record in records}, [], best
    while at["version"] != "v0":
        compared = at["performance"]["comparison_with_previous"]
        if compared is None:
            return [], f"{at['version']} was compared with no version"
        found.append(at)
        following = by_version.get(compared["against"])
        if following is None or following in found:
            return [], f"{at['version']} was compared with {compared['against']}, which is not recorded"
        at = following
    return found, ""


def speedup_over_v0(session: Session) -> dict | None:
    """{point, ci95, ratios, masked}: of the best version over v0, a product of paired ratios when there are several; None
    when it is not known. The interval is then the product of the ends, which is wider than a 95 % interval."""
    links, _ = chain(session.records, session.best) if session.best else ([], "")
    if not links:
        return None
    point, low, high = 1.0, 1.0, 1.0
    for link in links:
        compared = link["performance"]["comparison_with_previous"]
        point, low, high = point * compared["speedup"], low * compared["ci95"][0], high * compared["ci95"][1]
    pairs = [f"{r['version']} / {r['performance']['comparison_with_previous']['against']}" for r in reversed(links)]
    return {"point": point, "ci95": [low, high], "ratios": pairs, "masked": sum(r["masked"] for r in links)}


def speedup_line(session: Session) -> str:
    best, found = session.best, speedup_over_v0(session)
    if best is None:
        return no_best(session)
    if best["version"] == "v0":
        return "none: v0 is the best version"
    if found is None:
        return f"{UNKNOWN}: {chain(session.records, best)[1]}"
    if len(found["ratios"]) == 1:
        return f"{ratio(found['point'], found['ci95'])}, measured in pairs"
    low, high = found["ci95"]
    masked = f", {found['masked']} of them of masked versions" if found["masked"] else ""
    return (
        f"{found['point']:.3f}x ({low:.3f} to {high:.3f}): the product of {len(found['ratios'])} paired ratios "
        f"({', '.join(found['ratios'])}{masked}) and of the ends of their intervals; {best['version']} itself was not "
        "held against v0"
    )


def goal(session: Session) -> dict:
    """{met, since, targets}: gate.goal for the best version; met is None when there is no target, or no best version to
    tell. since: the version that met it first and after which no accepted one lost it again."""
    found = gate.goal(session.task["targets"], session.best)
    untold = not found["targets"] or not session.best_is_known
    met = None if untold else found["met"] and session.kernel_is_best
    return {**found, "met": met, "since": met_since(session) if met else None}


def met_since(session: Session) -> str:
    accepted = [record for record in session.records if verdict(record) == "accepted"]
    holds = itertools.takewhile(lambda r: gate.goal(session.task["targets"], r)["met"], reversed(accepted))
    return min((record["version"] for record in holds), key=version_number)


def no_best(session: Session) -> str:
    return "none: no version is accepted yet" if session.best_is_known else f"{UNKNOWN}: a record cannot be read"


def goal_line(session: Session) -> str:
    found = goal(session)
    if not found["targets"]:
        return "no targets are set (compute_utilization.py --workspace W --set-targets)"
    if found["met"] is None:
        return no_best(session)
    if session.best is None:
        return "NOT met: no version is accepted yet"
    if not session.kernel_is_best:
        return f"NOT met: kernel.py is not the accepted {session.best['version']}; what was measured is another kernel"
    return f"met since {found['since']}; {session.best['version']} is the best version" if found["met"] else "NOT met"


# --- sections -----------------------------------------------------------------------------------------------------


def page(session: Session, has_lessons: bool = False) -> Page:
    """The report; a workspace with nothing recorded has one, too. has_lessons: LESSONS lies where the page goes."""
    task = session.task
    asked = (
        task["platform"] or f"platform {UNKNOWN}",
        task["framework"],
        task["dtype"],
        (task["shapes"] or {}).get("default"),
    )
    by_itself = [Section("Unattended rounds", list(unattended(session)))] if session.unattended else []
    return Page(
        session.name,
        " · ".join(part for part in asked if part),
        [
            Section("Summary", list(overview(session, has_lessons))),
            Section("Task", list(asked_for(session))),
            Section("Plots", list(figures(session))),
            Section("Rounds", list(all_rounds(session))),
            *by_itself,
            Section("What remains", list(remains(session))),
            Section("Hardware values", list(hardware(session))),
            Section("Environment", list(environment(session))),
        ],
    )


def overview(session: Session, has_lessons: bool) -> Iterator:
    """Four sentences, then the targets and what qualifies them."""
    tone = {True: "good", False: "bad", None: "note"}[goal(session)["met"]]
    yield Text(f"Goal: {goal_line(session)}", tone)
    yield Facts(
        [
            ("Asked", asked_line(session)),
            ("Reached", reached_line(session)),
            ("What gave most", steps_line(session)),
            ("What remains", remains_line(session)),
        ]
    )
    for caution in cautions(session):
        yield Text(caution, "note")
    for gap in session.gaps:
        yield Text(f"Left out: {gap}", "bad")
    if targets := goal(session)["targets"]:
        yield Table(("workload", "metric", "target", "achieved", "state"), [target_row(target) for target in targets])
    verdicts = [verdict(record) for record in session.visible]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in plots.MARKERS if kind in verdicts)
    yield Facts(
        [
            ("Speed-up over v0", speedup_line(session)),
            ("Versions", counts if verdicts else "nothing is recorded yet"),
            ("Masked", f"{session.masked} left out of this report"),
        ]
    )
    if has_lessons:
        yield Link("What the session taught, in words:", LESSONS)


def asked_line(session: Session) -> str:
    goals = [
        f"{target['workload']} at {'most' if gate.sign(target['metric']) == '<=' else 'least'} {wanted(target)} ({basis(target)})"
        for target in session.task["targets"]
    ]
    asked = f"{session.name.removeprefix('Kernel optimisation: ')} on {session.task['platform'] or UNKNOWN}"
    return f"{asked}; goal: {', '.join(goals)}." if goals else f"{asked}; no targets are set."


def wanted(target: dict) -> str:
    """ "612 TFLOPS" """
    return f"{target['target']:.10g} {target['unit']}"


def basis(target: dict) -> str:
    """ "90 % of measured_bf16_matmul" """
    return f"{target.get('share_pct', TARGET_SHARE_PCT):g} % of {target['basis'].split(':')[0]}{gate.reach(target)}"


def reached_line(session: Session) -> str:
    best = session.best
    if best is None:
        return f"{no_best(session)}."
    found = speedup_over_v0(session)
    gained = f"speed-up over v0 {UNKNOWN}"
    if best["version"] == "v0":
        gained = "the baseline itself"
    elif found:
        count = len(found["ratios"])
        how = "measured in pairs" if count == 1 else f"the product of {count} paired steps"
        gained = f"{found['point']:.3f}x as fast as v0 ({how})"
    return f"{best['version']}, median {latency(best)}; share of the floor {share_of_floor(best)}; {gained}."


def steps_line(session: Session) -> str:
    """The accepted steps with the greatest paired ratios, each with its action."""
    links = chain(session.records, session.best)[0] if session.best else []
    steps = [(link["performance"]["comparison_with_previous"], link) for link in links if not link["masked"]]
    steps.sort(key=lambda step: -step[0]["speedup"])
    told = [
        f"{link['version']}, {compared['speedup']:.3f}x as fast as {compared['against']}: {one_line(change_words(link)).rstrip('.')}"
        for compared, link in steps[:GREATEST]
    ]
    words = "; ".join(told) or "no step that can be shown"
    return words if words.endswith("…") else f"{words}."


def remains_line(session: Session) -> str:
    if not session.task["targets"]:
        return "no targets are set."
    if session.best is None:
        return "no version is accepted yet: run_gate.py --version v0 judges the first."
    if not session.kernel_is_best:
        return "kernel.py is another kernel than the accepted one: put that back, or judge this one."
    still = [target for target in goal(session)["targets"] if not target["met"]]
    told = [f"{target['workload']} {target['metric']}: {distance(target)}" for target in still]
    return f"{'; '.join(told) or 'no target is open'}."


def cautions(session: Session) -> Iterator[str]:
    """What the median and the share of the floor do not say by themselves."""
    if session.best is None:
        return
    version, performance = session.best["version"], session.best["performance"]
    low, high, share = performance["p20_us"], performance["p80_us"], performance["floor_share_pct"]
    if low is not None and high is not None:
        spread = 100 * (high - low) / performance["latency_us"]
        if spread > WIDE_PCT:
            yield (
                f"The calls of {version} differ: p20 to p80 spans {spread:.1f} % of the median, so the median alone does not "
                "say how long a call takes. Verdicts rest on the paired ratios."
            )
    if share is not None and share > 100 and session.roof and roof_pairs(session.roof)[0][0] == "measured":
        yield "Above 100 %: the floor is made of rates that other kernels reached (Hardware values); a kernel may pass them."


def target_row(target: dict) -> tuple[str, ...]:
    achieved = NOT_RECORDED if target["achieved"] is None else f"{target['achieved']:.2f} {target['unit']}"
    return target["workload"], target["metric"], wanted(target), achieved, "met" if target["met"] else "NOT met"


def asked_for(session: Session) -> Iterator:
    task = session.task
    rules = [name for name in ("libraries", "only_these_shapes") if task.get(name)]
    yield Facts(
        [
            ("Platform", task["platform"] or UNKNOWN),
            ("Architecture", task["arch"] or UNKNOWN),
            ("Framework", task["framework"] or UNKNOWN),
            ("dtype", task["dtype"] or "as the reference makes it"),
            ("Tolerance", "the default of the dtype" if task["tolerance"] is None else f"{task['tolerance']:g}"),
            ("Allowed", ", ".join(rules) or "no libraries; other sizes and layouts are tried too"),
            ("Notes", task["additional_notes"] or "none"),
        ]
    )
    shapes, work = task["shapes"] or {}, task["work"] or {}
    if names := list(dict.fromkeys([*shapes, *work])):
        rows = [(name, shapes.get(name, UNKNOWN), *work_cells(work.get(name))) for name in names]
        yield Table(("workload", "shapes", "FLOPs", "least bytes", "dtype", "source"), rows)
    else:
        yield Text("Shapes and work are not counted yet (estimate_work.py --workspace W).", "note")
    for target in task["targets"]:
        yield Text(f"Target: {target['workload']} {target['metric']} {wanted(target)}, from")
        yield Citations([target["basis"]])
    yield Fold("reference.py: what is to be computed", [Code(session.reference, "python")])


def work_cells(work: dict | None) -> tuple[str, ...]:
    if work is None:
        return (UNKNOWN,) * 4
    return f"{work['flops']:,}", f"{work['bytes_min']:,}", work["dtype"], work["source"]


def figures(session: Session) -> Iterator:
    if not session.visible:
        yield Text("No plot: nothing is recorded yet.", "note")
        return
    target = next((target for target in session.task["targets"] if target["workload"] == "default"), None)
    if session.roof is None:
        yield Text(f"No roofline: {session.no_roof}.", "note")
    else:
        yield from limits(session, target)
    marks = [mark(session, place, record, "latency_us") for place, record in enumerate(session.visible)]
    floors = [record["performance"]["floor_us"] for record in session.visible]
    floor = next((floor for floor in reversed(floors) if floor), None)
    yield Figure(
        plots.trajectory(marks, floor, limit(target, "latency_us")),
        f"Median of each version, p20 to p80 as a bar. {KEY}; at the foot: no latency recorded. Latencies of different "
        "times are no verdict: the paired ratios below are.",
    )


def limit(target: dict | None, metric: str) -> float | None:
    """A target of that metric, as a height on a plot of it."""
    return target["target"] if target and target["metric"] == metric else None


def mark(session: Session, place: float, record: dict, metric: str) -> plots.Mark:
    """A version on a plot; its interval only where the plot is of the latency."""
    performance = record["performance"]
    value = performance[metric]
    ends = (performance["p20_us"], performance["p80_us"]) if metric == "latency_us" and value else (None, None)
    note = f"{record['version']}: {latency(record)}, {verdict(record)}"
    is_best = session.best is not None and record["version"] == session.best["version"]
    return plots.Mark(record["version"], place, value, verdict(record), note, *ends, best=is_best)


def limits(session: Session, target: dict | None) -> Iterator[Figure]:
    """The roofline, where the problem has FLOPs; the bandwidth of each version, where memory is the roof or the goal."""
    flops = session.task["work"]["default"]["flops"]
    if flops:
        yield roofline_figure(session, target)
    if not flops or limit(target, "bandwidth_gbps"):
        why = "The goal is a bandwidth." if flops else "The problem has 0 FLOPs, so memory is its roof."
        pairs = roof_pairs(session.roof)
        marks = [mark(session, place, record, "bandwidth_gbps") for place, record in enumerate(session.visible)]
        roofs = [(kind, bandwidth.value) for kind, (bandwidth, _) in pairs]
        caption = f"{why} {said(pairs, 1)}. {KEY}; at the foot: no rate recorded."
        yield Figure(plots.bandwidth(marks, roofs, limit(target, "bandwidth_gbps")), caption)


def roofline_figure(session: Session, target: dict | None) -> Figure:
    work, pairs = session.task["work"]["default"], roof_pairs(session.roof)
    intensity = work["flops"] / work["bytes_min"]
    marks = [mark(session, intensity, record, "tflops") for record in session.visible]
    roofs = [(kind, bandwidth.value, compute.value) for kind, (bandwidth, compute) in pairs if compute]
    off = [m.name for m in marks if m.value is None]
    absent = f" Not on the plot, no rate recorded: {', '.join(off)}." if off else ""
    return Figure(
        plots.roofline(plots.known(marks), intensity, roofs, target_line(target, intensity)),
        f"FLOPs over least bytes of the whole problem: {intensity:.4g} FLOP/byte, the same for every version. "
        f"{said(pairs, 2)}. {KEY}.{absent}",
    )


def roof_pairs(found: Roof) -> list[tuple[str, tuple]]:
    """(measured or documented, (bandwidth row, compute row)) of each roof; one where the wiki has no measured value."""
    pairs = [(found.bandwidth, found.compute), (found.peak_bandwidth, found.peak_compute)]
    measured = any(row and row.metric.startswith("measured") for row in pairs[0])
    named = [("measured" if measured else "documented", pairs[0]), ("documented", pairs[1])]
    return [(kind, pair) for kind, pair in (named if measured else named[:1]) if pair[0]]


def said(pairs: list[tuple[str, tuple]], count: int) -> str:
    """The first `count` rows of each roof."""
    roofs = ((kind, [row for row in rows[:count] if row]) for kind, rows in pairs)
    return "; ".join(f"{kind}: {', '.join(f'{r.metric} {r.text} {r.unit}' for r in rows)}" for kind, rows in roofs)


def target_line(target: dict | None, intensity: float) -> tuple[str, float] | None:
    """(name in the target's own unit, its height on the roofline in TFLOPS)."""
    if target is None or target["metric"] == "latency_us":
        return None
    tflops = target["target"] if target["metric"] == "tflops" else target["target"] * intensity / 1e3
    return f"target {target['target']:.5g} {target['unit']}", tflops


def all_rounds(session: Session) -> Iterator:
    if not session.visible:
        yield Text("None is recorded yet.", "note")
        return
    head = ("version", "change", "evidence of its plan", "verdict", "latency", "gain")
    yield Table(head, [round_row(session, record) for record in session.visible], linked=True)
    for record in session.visible:
        title = f"{record['version']}: {record['optimization']['action_category'] or NOT_RECORDED}, {verdict(record)}"
        yield Fold(title, list(one_round(session, record)), anchor=record["version"])


def unattended(session: Session) -> Iterator:
    """How optimize_kernel.py stopped, how the best compared then, and the answers of its agent that became no version."""
    lines = session.unattended
    final = [*itertools.takewhile(lambda line: line["outcome"] == "final", reversed(lines))][::-1]
    last = (lines[: len(lines) - len(final)] or lines)[-1]
    yield Text(
        f"Stopped: {last['message']}."
        if last["outcome"] == "stop"
        else f"No stop is noted; the last line: {last['message']}",
        "note",
    )
    if final:
        yield Table(("measured in pairs at the end", "verdict"), [(line["of"], line["message"]) for line in final])
    became_none = [line for line in lines if line["outcome"] not in RECORDED]
    if became_none:
        counts = Counter(line["outcome"] for line in became_none)
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        yield Text(f"Besides the versions above: {told}.")
        head = ("when", "round", "candidate", "outcome", "message")
        rows = [tuple(line[name] for name in ("at", "round", "of", "outcome", "message")) for line in became_none]
        yield Table(head, rows[-MOST_LINES:])


def round_row(session: Session, record: dict) -> tuple[str, ...]:
    return (
        record["version"],
        one_line(change_words(record)),
        evidence(session, record),
        verdict_line(record),
        latency(record),
        gain(record),
    )


def one_round(session: Session, record: dict) -> Iterator:
    """Plan, its evidence, what the profile before said, outcome, and the difference to the parent."""
    change = record["optimization"]
    yield Facts(
        [
            ("Change", change_words(record)),
            ("Expected", change["expected_impact"] or NOT_RECORDED),
            ("Risk", change["risks_and_rollback"] or NOT_RECORDED),
        ]
    )
    if rows := session.plans.get(record["version"]):
        yield Text("Evidence, as its plan gives it:")
        yield Table(rows[0], rows[1:])
    else:
        yield Text(f"Evidence: {no_evidence(record)}.", "note")
    yield Facts(list(outcome(session, record)))
    for title, entries in (
        ("Pitfalls and lessons", record["pitfalls_and_fixes"]),
        ("Searched", record["search_log"]),
        ("References", record["references"]),
    ):
        if entries:
            yield Text(f"{title}:")
            names = list(entries[0])
            yield Table([name.replace("_", " ") for name in names], [[entry[n] for n in names] for entry in entries])
    yield from difference(session, record)


def outcome(session: Session, record: dict) -> Iterator[tuple[str, str]]:
    """What programs found: in the profile before, and of this version."""
    times = record["performance"]["latency_us_by_workload"] or {}
    if record["version"] != "v0":
        yield profile_before(session, record)
    yield "Correctness", record["correctness"]["summary"] or record["correctness"]["status"] or NOT_RECORDED
    yield "Verdict", verdict_line(record)
    yield "Latency", "; ".join(f"{name} {us:.2f} us" for name, us in times.items()) or NOT_RECORDED
    yield "Share of the floor", share_of_floor(record)
    yield "Gain", gain(record)
    yield "Recorded", f"{record['timestamp']} on {record['device'] or UNKNOWN}"
    yield "Commit", record["git_commit_hash"] or "none"


def parent(session: Session, record: dict) -> dict | None:
    """What a round started from: the version it was compared with, else the last one accepted before it."""
    compared = record["performance"]["comparison_with_previous"]
    before = [r for r in session.records if version_number(r["version"]) < version_number(record["version"])]
    wanted = [r for r in before if r["version"] == compared["against"]] if compared else []
    accepted = [r for r in before if verdict(r) == "accepted"]
    return (wanted or accepted or [None])[-1]


def difference(session: Session, record: dict) -> Iterator:
    """The unified diff of kernel.py to the parent's, or why there is none."""
    before, version = parent(session, record), record["version"]
    if before is None:
        if version in session.sources:
            yield Text(f"kernel.py of {version}, the whole of it:")
            yield Code(session.sources[version], "python")
        else:
            yield Text(f"No source: {no_source(version)}.", "note")
        return
    if before["masked"]:
        yield Text(f"No diff: {before['version']}, which it started from, is masked.", "note")
        return
    if absent := [name for name in (before["version"], version) if name not in session.sources]:
        yield Text(f"No diff: {no_source(absent[0])}.", "note")
        return
    old, new = (session.sources[name].split("\n") for name in (before["version"], version))
    names = (f"{before['version']}/kernel.py", f"{version}/kernel.py")
    lines = list(difflib.unified_diff(old, new, *names, lineterm=""))
    yield Text(f"Against {before['version']}:" if lines else f"kernel.py is that of {before['version']}.")
    if lines:
        yield Code("\n".join(lines), "diff")


def no_source(version: str) -> str:
    return f"no file here has the SHA-256 that {version} was judged with (history, versions/, rejected/, kernel.py)"


def remains(session: Session) -> Iterator:
    """Open targets, then what the best version's profile says."""
    still = [target for target in goal(session)["targets"] if not target["met"]]
    for target in still:
        yield Text(f"Open: {target['workload']} {target['metric']}: {distance(target)}.", "bad")
    if not still:
        yield Text("No target is open." if session.task["targets"] else "No targets are set.", "note")
    best = session.best
    if best is None:
        return
    if session.found is None:
        yield Text(
            f"{best['version']} is {NOT_PROFILED} (profile_kernel.sh --workspace W --version {best['version']}).",
            "note",
        )
        return
    yield from profile_says(session)


def profile_says(session: Session) -> Iterator:
    """The diagnosis of the best version's profile."""
    best, found = session.best, session.found
    profile = session.profiles[best["version"]]
    params, findings = profile["params"], found["findings"]
    if params and params["kernel_sha256"] != best["kernel_sha256"]:
        yield Text(f"The profile in profiles/{best['version']} is of another kernel.", "bad")
    yield Facts(
        [
            (f"Profile of {best['version']}", profile_report.origin(params)),
            ("Longest kernel", Name(found["classification"]["of"])),
            ("Bottleneck", profile_report.bottleneck_line(found)),
            ("Under the profiler", profiler_time(profile)),
            ("Stop?", stop_line(found["speed_of_light"])),
        ]
    )
    if findings:
        yield Text("Rules that fired on its counters; their gains are estimates that nothing measured:")
    else:
        yield Text("No rule fired on its counters.", "note")
    for finding in findings[:TOP]:
        yield Fold(f"{finding['id']} ({finding['severity']}, {estimate(finding)})", [Facts(finding_facts(finding))])
    if len(findings) > TOP:
        yield Text(f"{len(findings) - TOP} more; analyze_profile.py lists them all.", "note")


def distance(target: dict) -> str:
    """How far a target that is not met is away."""
    if target["achieved"] is None:
        return f"{NOT_RECORDED}, target {wanted(target)}"
    share = target["achieved"] / target["target"]
    factor = share if target["metric"] == "latency_us" else 1 / share
    return f"{target['achieved']:.2f} of {wanted(target)}, {factor:.2f} times as fast is asked"


def profiler_time(profile: dict) -> str:
    time_us = profile_analysis.total_us(profile)
    return UNKNOWN if time_us is None else f"{time_us:.2f} us in kernels, which is not the measured latency"


def stop_line(found: dict) -> str:
    """ "yes: 95.2 % of the floor, at the copy rate, by the recorded latency …" """
    return f"{'yes' if found['should_stop'] else 'no'}: {found['reason']}"


def estimate(finding: dict) -> str:
    gained = finding["estimated_gain_pct"]
    return "gain unknown" if gained is None else f"at most {gained} % of the time"


def finding_facts(finding: dict) -> list[tuple[str, str]]:
    return [
        ("Evidence", profile_report.evidence_text(finding)),
        ("Inference", finding["inference"]),
        ("Try", "; ".join(finding["actions"])),
        ("Read", finding["wiki"]),
        ("Falsified if", finding["falsified_by"]),
    ]


def hardware(session: Session) -> Iterator:
    """The values that the roofs are made of, as the wiki cites them now."""
    if session.roof is None:
        yield Text(f"None: {session.no_roof}.", "note")
    else:
        yield Citations(session.roof.citations())


def environment(session: Session) -> Iterator:
    """GPU and clocks from the records, software from the profiles."""
    if not session.visible:
        yield Text("Nothing is recorded yet.", "note")
        return
    params = [profile["params"] for profile in session.profiles.values() if profile["params"]]
    yield Facts(
        [
            ("GPU", listed(record["device"] for record in session.visible)),
            *((name, listed(p.get(name) for p in params)) for name in ("driver", "torch", "profiler", "clocks")),
        ]
    )
    head = ("version", "recorded", "SM clock, MHz", "memory clock, MHz", "power, W", "temperature, C", "throttled by")
    yield Table(head, [state_row(record) for record in session.visible])


def listed(values: Iterator) -> str:
    """What was recorded, each value once."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value)) or NOT_RECORDED


def state_row(record: dict) -> tuple[str, ...]:
    """The state of the GPU while a version was timed."""
    watched = record["performance"]["gpu_state"] or {}
    figures = (watched.get(name) for name in ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c"))
    reasons = watched.get("throttle_reasons")
    throttled = ", ".join(map(str, reasons)) or "nothing" if isinstance(reasons, list) else NOT_RECORDED
    return record["version"], record["timestamp"], *(between(figure) for figure in figures), throttled


def between(figure) -> str:
    """ "1980", or "1755 to 1980": lowest to highest."""
    ends = [figure.get("min"), figure.get("max")] if isinstance(figure, dict) else []
    if not ends or not all(isinstance(end, int | float) for end in ends):
        return NOT_RECORDED
    low, high = map(number, ends)
    return low if low == high else f"{low} to {high}"


def summary(session: Session) -> dict:
    """The figures of the report, for --json."""
    return {
        "goal": goal(session),
        "best": session.best["version"] if session.best else None,
        "speedup_over_v0": speedup_over_v0(session),
        "versions": {record["version"]: verdict(record) for record in session.visible},
        "masked": session.masked,
        "gaps": session.gaps,
    }
