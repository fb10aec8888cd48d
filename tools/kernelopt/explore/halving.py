"""The candidates that stay in the race: pure functions of times that were taken in turn.

All candidates are timed once a round. A round gives each a ratio to the leader of that same round, so drift of the card
cancels out. Those that are slower for certain are dropped, and the time goes to the others.
"""

import math
import statistics
from dataclasses import dataclass

from ..measure import pairing

RESAMPLES = 400  # fewer than a comparison's: each candidate has an interval after each round
FIRST_ROUNDS = 5  # before any candidate is dropped
MOST_ROUNDS = 40
# A candidate of which each call took this many times as long as any of the leader needs no FIRST_ROUNDS.
HOPELESS = 3.0
# A candidate is dropped when it is slower for certain by more than this.
SLOWER = 0.01
# The race is over when each ratio to the leader is known to this.
KNOWN = 0.005
# Leaders are then timed again as the gate does it, with their inputs in other places of the memory. Why twelve:
# benchmarks/README.md.
PLACEMENTS, ROUNDS_A_PLACEMENT = 12, 15


@dataclass(frozen=True)
class Ratio:
    """The speed-up of one candidate over another, with a 95 % bootstrap interval of the median over rounds."""

    point: float
    low: float
    high: float

    def to_json(self) -> dict:
        return {"point": self.point, "ci95": [self.low, self.high]}


def ratio(times_us: list[float | None], others_us: list[float | None]) -> Ratio | None:
    """The speed-up of one candidate over another, from the rounds in which both ran; None where there is no such
    round."""
    import numpy

    pairs = zip(times_us, others_us, strict=False)
    logs = numpy.array([math.log(other / own) for own, other in pairs if own is not None and other is not None])
    if not len(logs):
        return None
    low, high = pairing.median_interval(logs, RESAMPLES)
    return Ratio(math.exp(float(numpy.median(logs))), math.exp(low), math.exp(high))


def widest(calls_us: list[float], others_us: list[float]) -> Ratio:
    """The speed-up of one candidate over another, and all that any two of their calls give: of too few rounds for an
    interval."""
    point = statistics.median(others_us) / statistics.median(calls_us)
    return Ratio(point, min(others_us) / max(calls_us), max(others_us) / min(calls_us))


def shared(times_us: list[float | None], others_us: list[float | None]) -> int:
    """The number of rounds in which both ran."""
    return sum(None not in pair for pair in zip(times_us, others_us, strict=False))


def hopeless(calls_us: dict[str, list[float]], first: str) -> list[str]:
    """The candidates each of whose calls took HOPELESS times as long as the longest of `first`."""
    limit = HOPELESS * max(calls_us[first])
    return [name for name, times in calls_us.items() if min(times) > limit]


def places(rounds: dict[str, list[float | None]]) -> dict[str, float]:
    """How each candidate's time compares with the others' of the same round: the median logarithm, least first. rounds:
    name -> one time a round, None where it did not run. Where they have no round in common: the median time of each."""
    common = [times for times in zip(*rounds.values(), strict=False) if None not in times]
    logs = [[math.log(time) for time in times] for times in common]
    relative = [[log - statistics.fmean(line) for log in line] for line in logs]
    if relative:
        medians = [statistics.median(column) for column in zip(*relative, strict=True)]
    else:
        medians = [statistics.median(time for time in times if time is not None) for times in rounds.values()]
    return dict(sorted(zip(rounds, medians, strict=True), key=lambda place: place[1]))


def leader(rounds: dict[str, list[float | None]]) -> str:
    """The first of `places`."""
    return next(iter(places(rounds)))


def slower(rounds: dict[str, list[float | None]], first: str) -> list[str]:
    """The candidates that are slower than `first` for certain."""
    ratios = {name: ratio(times, rounds[first]) for name, times in rounds.items() if name != first}
    return [name for name, speedup in ratios.items() if speedup and speedup.high < 1 / (1 + SLOWER)]


def settled(rounds: dict[str, list[float | None]], first: str) -> bool:
    """Is each one's ratio to `first` known to KNOWN?"""
    ratios = [ratio(times, rounds[first]) for name, times in rounds.items() if name != first]
    return all(speedup and (speedup.high - speedup.low) / 2 <= KNOWN for speedup in ratios)
