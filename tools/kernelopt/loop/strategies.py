"""From which versions the candidates of a round start. A strategy is a class with `starts`."""

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
    """The candidates start in turn from the best version and the fastest right ones that were refused, `width` together: a change
    that gained nothing may open the way for the next."""

    width: int

    def starts(self, records: RecordStore, count: int) -> list[str]:
        known = records.records()
        times = relative_times(known)
        slower = (record for record in known if not record.git_commit_hash and not too_fast(record))
        refused = [record.version for record in slower if record.version in times]
        kept = [records.best().version, *sorted(refused, key=times.get)][: self.width]
        return [kept[number % len(kept)] for number in range(count)]


def too_fast(record: Record) -> bool:
    """Was it refused because no hardware allows its time? Then its order means nothing."""
    return acceptance.is_impossible(record.quality_gate.failure_reason)


def relative_times(records: list[Record]) -> dict[str, float]:
    """{version: its time over v0's} of the right versions, by the chain of paired comparisons that leads to v0. Pure.

    Only an order to try things in: no verdict rests on a chain.
    """
    times: dict[str, float] = {}
    for record in records:
        compared = record.comparison
        if record.correctness.status != "PASS":
            continue
        if compared is None:
            times[record.version] = 1.0
        elif compared.against in times:
            times[record.version] = times[compared.against] / compared.speedup
    return times
