"""The section of the rounds: plan, evidence, outcome and diff of each version, and the unattended run. Pure."""

import difflib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, fields

from ..session.record import Record
from . import phrases
from .document import Code, Facts, Fold, Table, Text
from .gather import Session

# lines of an unattended run that stand elsewhere in the report
RECORDED = ("accepted", "rejected", "diverged", "stop", "final")
MOST_LINES = 40  # of the others, the latest


def all_rounds(session: Session) -> Iterator:
    if not session.visible:
        yield Text("None is recorded yet.", "note")
        return
    head = ("version", "change", "evidence of its plan", "verdict", "latency", "gain")
    yield Table(head, [round_row(session, record) for record in session.visible], linked=True)
    for record in session.visible:
        category = record.optimization.action_category or phrases.NOT_RECORDED
        title = f"{record.version}: {category}, {phrases.verdict(record)}"
        yield Fold(title, list(one_round(session, record)), anchor=record.version)


def unattended(session: Session) -> Iterator:
    """How optimize_kernel.py stopped, how the best compared then, and the answers of its agent that became no
    version."""
    lines = session.unattended
    final = [*itertools.takewhile(lambda line: line.outcome == "final", reversed(lines))][::-1]
    last = (lines[: len(lines) - len(final)] or lines)[-1]
    yield Text(
        f"Stopped: {last.message}." if last.outcome == "stop" else f"No stop is noted; the last line: {last.message}",
        "note",
    )
    if final:
        yield Table(("measured in pairs at the end", "verdict"), [(line.of, line.message) for line in final])
    became_none = [line for line in lines if line.outcome not in RECORDED]
    if became_none:
        counts = Counter(line.outcome for line in became_none)
        listed = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        yield Text(f"Besides the versions above: {listed}.")
        head = ("when", "round", "candidate", "outcome", "message")
        rows = [astuple(line) for line in became_none]
        yield Table(head, rows[-MOST_LINES:])


def round_row(session: Session, record: Record) -> tuple[str, ...]:
    return (
        record.version,
        phrases.one_line(phrases.change_words(record)),
        phrases.evidence(session, record),
        phrases.verdict_line(record),
        phrases.latency(record),
        phrases.gain(record),
    )


def one_round(session: Session, record: Record) -> Iterator:
    """Plan, its evidence, the findings in the earlier profile, outcome, and the difference to the parent."""
    change = record.optimization
    yield Facts(
        [
            ("Change", phrases.change_words(record)),
            ("Expected", change.expected_impact or phrases.NOT_RECORDED),
            ("Risk", change.risks_and_rollback or phrases.NOT_RECORDED),
        ]
    )
    if rows := session.plans.get(record.version):
        yield Text("Evidence, as its plan gives it:")
        yield Table(rows[0], rows[1:])
    else:
        yield Text(f"Evidence: {phrases.no_evidence(record)}.", "note")
    yield Facts(list(outcome(session, record)))
    for title, entries in (
        ("Pitfalls and lessons", record.pitfalls_and_fixes),
        ("Searched", record.search_log),
        ("References", record.references),
    ):
        if entries:
            yield Text(f"{title}:")
            names = [field.name for field in fields(entries[0])]
            yield Table([name.replace("_", " ") for name in names], [astuple(entry) for entry in entries])
    yield from difference(session, record)


def outcome(session: Session, record: Record) -> Iterator[tuple[str, str]]:
    """The findings of programs: in the earlier profile, and on this version."""
    times = record.performance.latency_us_by_workload or {}
    if record.version != "v0":
        yield phrases.profile_before(session, record)
    yield "Correctness", record.correctness.summary or record.correctness.status or phrases.NOT_RECORDED
    yield "Verdict", phrases.verdict_line(record)
    yield "Latency", "; ".join(f"{name} {us:.2f} us" for name, us in times.items()) or phrases.NOT_RECORDED
    yield phrases.share_name(session).capitalize(), phrases.share_of_floor(record)
    yield "Gain", phrases.gain(record)
    yield "Recorded", f"{record.timestamp} on {record.device or phrases.UNKNOWN}"
    yield "Commit", record.git_commit_hash or "none"


def difference(session: Session, record: Record) -> Iterator:
    """The unified diff of kernel.py to the parent's, or why there is none."""
    before, version = phrases.parent(session, record), record.version
    if before is None:
        if version in session.sources:
            yield Text(f"kernel.py of {version}, the whole of it:")
            yield Code(session.sources[version], "python")
        else:
            yield Text(f"No source: {no_source(version)}.", "note")
        return
    if before.masked:
        yield Text(f"No diff: {before.version}, which it started from, is masked.", "note")
        return
    if absent := [name for name in (before.version, version) if name not in session.sources]:
        yield Text(f"No diff: {no_source(absent[0])}.", "note")
        return
    old, new = (session.sources[name].split("\n") for name in (before.version, version))
    names = (f"{before.version}/kernel.py", f"{version}/kernel.py")
    lines = list(difflib.unified_diff(old, new, *names, lineterm=""))
    yield Text(f"Against {before.version}:" if lines else f"kernel.py is that of {before.version}.")
    if lines:
        yield Code("\n".join(lines), "diff")


def no_source(version: str) -> str:
    return f"no file here has the SHA-256 that {version} was judged with (history, versions/, rejected/, kernel.py)"
