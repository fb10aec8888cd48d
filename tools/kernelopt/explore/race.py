"""The race: rounds of timed turns among the entrants that run. halving.py says who stays in it."""

import math
import statistics
import time
from collections.abc import Callable, Collection

from . import halving
from .entrants import Entrant

SUSPECT_CALLS = 2  # one on each of the inputs
TURN_US = 3000.0  # of calls in a candidate's turn
CALLS = (4, 10)  # in a turn: at least, at most; even, since values may make one of the two inputs more work
FINAL_S = 6.0  # for the leaders, once the race is over
MOVE_S = 60.0
FIRST_TURN_S = 30.0  # for a turn of an entrant whose time is not known yet
# Then for what is no call, and for each call that a turn may have: a process that shares the GPU with hanging kernels,
# in turns with them, may take ten times as long as alone.
TURN_S, TIMES_AS_LONG = 10.0, 10
ROUNDS_A_MOVE = 2.0  # where large inputs take long to move: the rounds then take this many times as long
FIRST_SHARE = 1 / 3  # of FINAL_S, at most, where the inputs lie first: how long moving takes is not known yet


class Race:
    """until: the end of all rounds, on the monotonic clock. against: the entrant that all ratios refer to, and that no
    few calls drop. rounds: how many were run."""

    def __init__(self, entrants: list[Entrant], until: float, against: str | None = None):
        self.entrants, self.until, self.against, self.rounds = entrants, until, against, 0

    def running(self) -> list[Entrant]:
        return [entrant for entrant in self.entrants if entrant.process and not entrant.dropped]

    def finalists(self) -> list[Entrant]:
        """Who takes part in the last rounds: what runs and is no probe."""
        return [entrant for entrant in self.running() if not entrant.is_probe]

    def run(self, last: bool, say: Callable[[str], None]) -> None:
        """Time the running entrants in turn until the leaders are known, no round is left, or time is up. Before
        another wave starts, the slower half makes room, whatever the times say."""
        half = max(1, len(self.running()) // 2)
        for number in range(halving.MOST_ROUNDS if last else halving.FIRST_ROUNDS):
            if not self.running() or (number and time.monotonic() > self.until):
                break
            suspects = self.hopeless()
            self.one_round(self.running(), suspects)
            self.drop_hopeless(suspects)
            if number + 1 >= halving.FIRST_ROUNDS:
                self.drop()
                if self.is_settled():
                    break
        if last:
            self.final()
        else:
            self.make_room(half)
        say(f"{len(self.running())} in the lead after {self.rounds} rounds")

    def final(self) -> None:
        """More rounds among the leaders, again with their inputs elsewhere: the gate's processes differ in that too.
        Probes have no part in them: no gate judges one, and they would take the time of the candidates."""
        end, moving_s = min(self.until, time.monotonic() + FINAL_S), 0.0
        for placement in range(halving.PLACEMENTS):
            began = time.monotonic()
            left_s = end - began
            if sum(not entrant.is_opponent for entrant in self.finalists()) < 2 or left_s < 0:
                return
            if left_s < (1 + ROUNDS_A_MOVE) * moving_s:  # another move is not worth its time
                self.rounds_among_leaders(halving.PLACEMENTS * halving.ROUNDS_A_PLACEMENT, end)
                return
            for entrant in self.finalists() if placement else ():
                entrant.move(MOVE_S)
            moving_s = time.monotonic() - began
            share_s = FIRST_SHARE * left_s if not placement else left_s / (halving.PLACEMENTS - placement)
            part_end = min(end, began + moving_s + max(share_s, ROUNDS_A_MOVE * moving_s))
            self.rounds_among_leaders(halving.ROUNDS_A_PLACEMENT, part_end)

    def rounds_among_leaders(self, most: int, until: float) -> None:
        """until: on the monotonic clock."""
        for _ in range(most):
            if self.finalists() and time.monotonic() < until:
                self.one_round(self.finalists())

    def make_room(self, most: int) -> None:
        """End all processes but those of `most` entrants: of the fastest candidate, then the one that ratios refer to,
        then the next candidates; probes and other opponents, which may be faster and are never kept, go first."""
        candidates = sorted((one for one in self.running() if not one.is_opponent), key=median_of)
        opponents = sorted((one for one in self.running() if one.is_opponent), key=median_of)
        against = [one for one in opponents if one.name == self.against]
        others = [one for one in opponents if one.name != self.against]
        slower = [*candidates[:1], *against, *candidates[1:], *others][most:]
        for entrant in (*slower, *(one for one in self.entrants if one.dropped)):
            entrant.dropped = True
            entrant.end()

    def one_round(self, running: list[Entrant], suspects: Collection[str] = ()) -> None:
        """A turn for each, in changing order; a short one for suspects."""
        shift = self.rounds % len(running)
        for entrant in [*running[shift:], *running[:shift]]:
            expected = entrant.rounds_us[-1] if entrant.calls_us else None
            calls = SUSPECT_CALLS if entrant.name in suspects else calls_in_a_turn(expected)
            taken = entrant.time(turn_limit_s(expected), calls)
            entrant.rounds_us += [None] * (self.rounds - len(entrant.rounds_us))
            if taken:
                entrant.calls_us += taken
                entrant.rounds_us.append(time_of_turn(taken))
        self.rounds += 1

    def hopeless(self) -> set[str]:
        """Who is slower than the leading candidate by far in all its turns so far."""
        first = self.leader()
        calls_us = {entrant.name: entrant.calls_us for entrant in self.running() if entrant.calls_us}
        return set(halving.hopeless(calls_us, first)) - {self.against} if first else set()

    def drop_hopeless(self, suspects: Collection[str]) -> None:
        """Drop the suspects whose latest turn agrees: at a first one the card may not have been at its clock."""
        slower = self.hopeless() & set(suspects)
        for entrant in self.running():
            entrant.dropped = entrant.name in slower

    def drop(self) -> None:
        """Drop what is slower than the leading candidate for certain. An opponent is never the leader: the candidates
        are compared with each other, however fast it is."""
        first = self.leader()
        slower = set(halving.slower(self.times(), first)) if first else set()
        for entrant in self.running():
            entrant.dropped = entrant.name in slower

    def is_settled(self) -> bool:
        first = self.leader()
        return first is None or halving.settled(self.times(), first)

    def leader(self) -> str | None:
        candidates = self.times(opponents=False)
        return halving.leader(candidates) if candidates else None

    def times(self, opponents: bool = True) -> dict[str, list[float | None]]:
        """name -> one time a round, of the running entrants that have any."""
        timed = [entrant for entrant in self.running() if entrant.calls_us]
        return {entrant.name: entrant.rounds_us for entrant in timed if opponents or not entrant.is_opponent}


def time_of_turn(calls_us: list[float]) -> float:
    """The geometric mean of the two inputs' (lower) medians. The calls are on the inputs in turn. The first call of a
    turn, and one in which the machine did something else, may take three times as long as the others."""
    return statistics.geometric_mean(statistics.median_low(part) for part in (calls_us[::2], calls_us[1::2]) if part)


def calls_in_a_turn(expected_us: float | None) -> int:
    least, most = CALLS
    return least if expected_us is None else max(least, min(most, 2 * int(TURN_US / expected_us / 2)))


def turn_limit_s(expected_us: float | None) -> float:
    """The time after which an entrant hangs. expected_us: of a call, None where it is not known yet."""
    return FIRST_TURN_S if expected_us is None else TURN_S + TIMES_AS_LONG * CALLS[1] * expected_us / 1e6


def median_of(entrant: Entrant) -> float:
    """Of its rounds, in microseconds; of calls it would be that of one of the two inputs, where they differ in work."""
    return statistics.median([one for one in entrant.rounds_us if one] or entrant.calls_us or [math.inf])
