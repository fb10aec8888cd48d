"""Records in words: verdicts, latencies, gains, the goal. Pure."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ..audit.citations import CITATION
from ..hardware import roofline
from ..hardware.roofline import Roof
from ..session import stop_conditions
from ..session.record import Record
from ..session.stop_conditions import Standing
from ..session.task import Target
from ..session.version_names import version_number
from .gather import Session

LINE, CELL = 160, 90  # characters of an action and of a row of evidence on one line; the fold of a round has all
WIDE_PCT = 5  # p20 to p80 over the median; the calls of most kernels stay within 3 %
UNKNOWN = "UNKNOWN"
NOT_RECORDED = "not recorded"
NOT_PROFILED = "not profiled"


# --- verdicts in words --------------------------------------------------------------------------------------------


def verdict(record: Record) -> str:
    return "not judged" if not record.is_judged else "accepted" if record.passed else "rejected"


def verdict_line(record: Record) -> str:
    """The verdict with its reason."""
    reason = record.quality_gate.failure_reason
    if reason is None and record.deciding:
        workload, compared = record.deciding
        reason = compared.verdict if workload == "default" else f"{compared.verdict} on {workload}"
    if verdict(record) == "accepted" and reason is None:
        reason = "the first version"
    return f"{verdict(record)}: {reason}" if reason else verdict(record)


def latency(record: Record) -> str:
    """ "262.46 us (p20 261.63 to p80 263.78)": the median first."""
    if record.latency_us is None:
        return NOT_RECORDED
    low, high = record.performance.p20_us, record.performance.p80_us
    between = f" (p20 {low:.2f} to p80 {high:.2f})" if low is not None and high is not None else ""
    return f"{record.latency_us:.2f} us{between}"


def ratio(point: float, ends: Sequence[float]) -> str:
    return f"{point:.3f}x (95 % interval {ends[0]:.3f} to {ends[1]:.3f})"


def gain(record: Record) -> str:
    compared = record.comparison
    if compared is None:
        return "not compared"
    others = {name: one for name, one in (record.performance.comparison_by_workload or {}).items() if name != "default"}
    parts = [f"{ratio(compared.speedup, compared.ci95)} against {compared.against}"]
    return "; ".join(parts + [f"{name} {ratio(one.speedup, one.ci95)}, {one.verdict}" for name, one in others.items()])


def by_library_rate(session: Session) -> bool:
    """Does a library's rate stand in for the floor?"""
    work = session.task.work_of()
    return bool(session.roof and work) and roofline.bound(work.flops, work.bytes_min, session.roof).library_rate


def share_name(session: Session) -> str:
    """What the recorded share is of: the floor, or a library's rate where no floor was measured."""
    return f"share of {roofline.floor_name(by_library_rate(session))}"


def share_of_floor(record: Record) -> str:
    """The share by the measured median. The profiler's time gives another share, which is labelled as such."""
    share = record.performance.floor_share_pct
    return NOT_RECORDED if share is None else f"{share:.1f} %"


def change_words(record: Record) -> str:
    return record.action or record.optimization.action_category or NOT_RECORDED


def one_line(words: str, width: int = LINE) -> str:
    """The first words of a text, as many as fit. A text with a citation stays whole, because a cut citation would be
    invalid."""
    if CITATION.search(words):
        return words
    return textwrap.shorten(words, width, placeholder=" …")


def evidence(session: Session, record: Record) -> str:
    """The evidence in the plan of a round, in short: source and finding of each row."""
    rows = session.plans.get(record.version)
    if rows is None:
        return no_evidence(record)
    at = rows[0].index("finding") if "finding" in rows[0] else len(rows[0]) - 1
    return "; ".join(one_line(": ".join(dict.fromkeys((row[0], row[at]))), CELL) for row in rows[1:])


def no_evidence(record: Record) -> str:
    version = record.version
    return "none, it is the baseline" if version == "v0" else f"none in plans/{version}_plan.md"


def profile_before(session: Session, record: Record) -> tuple[str, str]:
    """The gate's findings in the profile of the version that a round started from, whether or not the plan used it."""
    before, profile = parent(session, record), record.profile_evidence
    parts = [part for part in (profile.tool_used, profile.bottleneck_type, profile.evidence_summary) if part]
    if profile.evidence_chain:
        parts.append(f"its first finding: {profile.evidence_chain.replace(' -> ', ' → ')}")
    name = before.version if before else "the version before"
    return f"Profile of {name} said", "; ".join(parts) or f"nothing: {NOT_PROFILED}"


def chain(records: list[Record], best: Record) -> tuple[list[Record], str]:
    """(records from the best down to the one that was compared with v0, why the chain breaks or "")."""
    by_version, links, at = {record.version: record for record in records}, [], best
    while at.version != "v0":
        if at.comparison is None:
            return [], f"{at.version} was compared with no version"
        links.append(at)
        following = by_version.get(at.comparison.against)
        if following is None or following in links:
            return [], f"{at.version} was compared with {at.comparison.against}, which is not recorded"
        at = following
    return links, ""


@dataclass(frozen=True)
class SpeedupOverV0:
    """A product of paired ratios. ci95: the product of the ends of their intervals, which is wider than a 95 %
    interval when there are several. ratios: "v2 / v1" each. masked: how many of them are of masked versions."""

    point: float
    ci95: tuple[float, float]
    ratios: list[str]
    masked: int

    def to_json(self) -> dict:
        """The JSON object."""
        return {"point": self.point, "ci95": list(self.ci95), "ratios": self.ratios, "masked": self.masked}


def speedup_over_v0(session: Session) -> SpeedupOverV0 | None:
    """How many times as fast as v0 the best version is; None when that is not known."""
    links, _ = chain(session.records, session.best) if session.best else ([], "")
    if not links:
        return None
    compared = [link.comparison for link in links]
    return SpeedupOverV0(
        point=math.prod(each.speedup for each in compared),
        ci95=(math.prod(each.ci95[0] for each in compared), math.prod(each.ci95[1] for each in compared)),
        ratios=[f"{link.version} / {link.comparison.against}" for link in reversed(links)],
        masked=sum(link.masked for link in links),
    )


def speedup_line(session: Session) -> str:
    best, speedup = session.best, speedup_over_v0(session)
    if best is None:
        return no_best(session)
    if best.version == "v0":
        return "none: v0 is the best version"
    if speedup is None:
        return f"{UNKNOWN}: {chain(session.records, best)[1]}"
    if len(speedup.ratios) == 1:
        return f"{ratio(speedup.point, speedup.ci95)}, measured in pairs"
    low, high = speedup.ci95
    masked = f", {speedup.masked} of them of masked versions" if speedup.masked else ""
    return (
        f"{speedup.point:.3f}x ({low:.3f} to {high:.3f}): the product of {len(speedup.ratios)} paired ratios "
        f"({', '.join(speedup.ratios)}{masked}) and of the ends of their intervals; {best.version} itself was not "
        "held against v0"
    )


@dataclass(frozen=True)
class Goal:
    """The Stop Conditions for the best version. met: None when there is no target, or the best version is not known.
    since: the version that met them first and after which no accepted one lost them again."""

    met: bool | None
    standings: list[Standing]
    since: str | None

    @property
    def open(self) -> list[Standing]:
        """The targets that are not met."""
        return [standing for standing in self.standings if not standing.met]

    def to_json(self) -> dict:
        """The JSON object."""
        return {"met": self.met, "targets": [standing.to_json() for standing in self.standings], "since": self.since}


def goal(session: Session) -> Goal:
    standings = stop_conditions.standings(session.task.targets, session.best)
    if not standings or not session.best_is_known:
        return Goal(None, standings, None)
    met = all(standing.met for standing in standings) and session.kernel_is_best
    return Goal(met, standings, met_since(session) if met else None)


def met_since(session: Session) -> str:
    accepted = [record for record in session.records if record.passed]
    holds = itertools.takewhile(lambda r: stop_conditions.are_met(session.task.targets, r), reversed(accepted))
    return min((record.version for record in holds), key=version_number)


def no_best(session: Session) -> str:
    return "none: no version is accepted yet" if session.best_is_known else f"{UNKNOWN}: a record cannot be read"


def goal_line(session: Session) -> str:
    reached = goal(session)
    if not reached.standings:
        return "no targets are set (compute_utilization.py --workspace W --set-targets)"
    if reached.met is None:
        return no_best(session)
    if session.best is None:
        return "NOT met: no version is accepted yet"
    if not session.kernel_is_best:
        return f"NOT met: kernel.py is not the accepted {session.best.version}; what was measured is another kernel"
    return f"met since {reached.since}; {session.best.version} is the best version" if reached.met else "NOT met"


def parent(session: Session, record: Record) -> Record | None:
    """The version that a round started from: the one it was compared with, else the last one accepted before it."""
    compared = record.comparison
    before = [other for other in session.records if version_number(other.version) < version_number(record.version)]
    wanted = [other for other in before if other.version == compared.against] if compared else []
    accepted = [other for other in before if other.passed]
    return (wanted or accepted or [None])[-1]


# --- targets and roofs --------------------------------------------------------------------------------------------


def wanted(target: Target) -> str:
    """ "612 TFLOPS" """
    return f"{target.target:.10g} {target.unit}"


def distance(standing: Standing) -> str:
    """The distance from a target that is not met."""
    target = standing.target
    if standing.achieved is None:
        return f"{NOT_RECORDED}, target {wanted(target)}"
    share = standing.achieved / target.target
    factor = share if target.metric == "latency_us" else 1 / share
    return f"{standing.achieved:.2f} of {wanted(target)}, {factor:.2f} times as fast is asked"


def roof_pairs(roof: Roof) -> list[tuple[str, tuple]]:
    """(measured or documented, (bandwidth row, compute row)) of each roof; one where the wiki has no measured value."""
    pairs = [(roof.bandwidth, roof.compute), (roof.peak_bandwidth, roof.peak_compute)]
    measured = any(row and row.metric.startswith("measured") for row in pairs[0])
    named = [("measured" if measured else "documented", pairs[0]), ("documented", pairs[1])]
    return [(kind, pair) for kind, pair in (named if measured else named[:1]) if pair[0]]
