"""The versions that the candidates of a round start from. A strategy is a class with `starts`."""

from dataclasses import dataclass

from ..gate import acceptance
from ..session.record import Record
from ..session.record_store import RecordStore


@dataclass(frozen=True)
class Greedy:
    """All candidates start from the best version."""

    def starts(self, records: RecordStore, count: int) -> list[str]:
        return [records.best().version] * count


@dataclass(frozen=True)
class Beam:
    """The candidates start in turn from `width` versions: the best, then the fastest correct ones that were refused.

    A change that gained nothing may open the way for the next.
    """

    width: int

    def starts(self, records: RecordStore, count: int) -> list[str]:
        known = records.records()
        times = relative_times(known)
        slower = (record for record in known if not record.git_commit_hash and not too_fast(record))
        refused = [record.version for record in slower if record.version in times]
        chosen = [records.best().version, *sorted(refused, key=times.get)][: self.width]
        return [chosen[number % len(chosen)] for number in range(count)]


def too_fast(record: Record) -> bool:
    """Whether it was refused because the hardware does not allow its time. Such a time means nothing."""
    return acceptance.is_impossible(record.quality_gate.failure_reason)


def relative_times(records: list[Record]) -> dict[str, float]:
    """{version: its time over v0's} of the correct versions, by the chain of paired comparisons that leads to v0. Pure.

    It orders candidates; no verdict rests on it.
    """
    times: dict[str, float] = {}
    for record in records:
        if record.correctness.status != "PASS":
            continue
        compared = record.comparison
        if compared is None:
            times[record.version] = 1.0
        elif compared.against in times and compared.speedup:
            times[record.version] = times[compared.against] / compared.speedup
    return times
