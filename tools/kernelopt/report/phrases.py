"""Records in words: verdicts, latencies, gains, the goal. Pure."""

import itertools
import textwrap
from collections.abc import Sequence

from ..audit.citations import CITATION
from ..session import stop_conditions
from ..session.workspace import version_number
from .gather import Session

LINE, CELL = 160, 90  # characters of an action and of a row of evidence on one line; the fold of a round has all
WIDE_PCT = 5  # p20 to p80 over the median; the calls of most kernels stay within 3 %
UNKNOWN = "UNKNOWN"
NOT_RECORDED = "not recorded"
NOT_PROFILED = "not profiled"


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
    """The diagnosis that the gate recorded of the version before, whether or not the plan used it."""
    before, evidence = parent(session, record), record["profile_evidence"]
    parts = [
        part for part in (evidence["tool_used"], evidence["bottleneck_type"], evidence["evidence_summary"]) if part
    ]
    if evidence["evidence_chain"]:
        parts.append(f"its first finding: {evidence['evidence_chain'].replace(' -> ', ' → ')}")
    name = before["version"] if before else "the version before"
    return f"Profile of {name} said", "; ".join(parts) or f"nothing: {NOT_PROFILED}"


def chain(records: list[dict], best: dict) -> tuple[list[dict], str]:
    """(records from the best down to the one that was compared with v0, why the chain breaks or "")."""
    by_version, links, at = {record["version"]: record for record in records}, [], best
    while at["version"] != "v0":
        compared = at["performance"]["comparison_with_previous"]
        if compared is None:
            return [], f"{at['version']} was compared with no version"
        links.append(at)
        following = by_version.get(compared["against"])
        if following is None or following in links:
            return [], f"{at['version']} was compared with {compared['against']}, which is not recorded"
        at = following
    return links, ""


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
    best, speedup = session.best, speedup_over_v0(session)
    if best is None:
        return no_best(session)
    if best["version"] == "v0":
        return "none: v0 is the best version"
    if speedup is None:
        return f"{UNKNOWN}: {chain(session.records, best)[1]}"
    if len(speedup["ratios"]) == 1:
        return f"{ratio(speedup['point'], speedup['ci95'])}, measured in pairs"
    low, high = speedup["ci95"]
    masked = f", {speedup['masked']} of them of masked versions" if speedup["masked"] else ""
    return (
        f"{speedup['point']:.3f}x ({low:.3f} to {high:.3f}): the product of {len(speedup['ratios'])} paired ratios "
        f"({', '.join(speedup['ratios'])}{masked}) and of the ends of their intervals; {best['version']} itself was not "
        "held against v0"
    )


def goal(session: Session) -> dict:
    """{met, since, targets}: gate.goal for the best version; met is None when there is no target, or no best version to
    tell. since: the version that met it first and after which no accepted one lost it again."""
    goals = stop_conditions.goal(session.task["targets"], session.best)
    untold = not goals["targets"] or not session.best_is_known
    met = None if untold else goals["met"] and session.kernel_is_best
    return {**goals, "met": met, "since": met_since(session) if met else None}


def met_since(session: Session) -> str:
    accepted = [record for record in session.records if verdict(record) == "accepted"]
    holds = itertools.takewhile(lambda r: stop_conditions.goal(session.task["targets"], r)["met"], reversed(accepted))
    return min((record["version"] for record in holds), key=version_number)


def no_best(session: Session) -> str:
    return "none: no version is accepted yet" if session.best_is_known else f"{UNKNOWN}: a record cannot be read"


def goal_line(session: Session) -> str:
    goals = goal(session)
    if not goals["targets"]:
        return "no targets are set (compute_utilization.py --workspace W --set-targets)"
    if goals["met"] is None:
        return no_best(session)
    if session.best is None:
        return "NOT met: no version is accepted yet"
    if not session.kernel_is_best:
        return f"NOT met: kernel.py is not the accepted {session.best['version']}; what was measured is another kernel"
    return f"met since {goals['since']}; {session.best['version']} is the best version" if goals["met"] else "NOT met"


def parent(session: Session, record: dict) -> dict | None:
    """What a round started from: the version it was compared with, else the last one accepted before it."""
    compared = record["performance"]["comparison_with_previous"]
    before = [r for r in session.records if version_number(r["version"]) < version_number(record["version"])]
    wanted = [r for r in before if r["version"] == compared["against"]] if compared else []
    accepted = [r for r in before if verdict(r) == "accepted"]
    return (wanted or accepted or [None])[-1]
