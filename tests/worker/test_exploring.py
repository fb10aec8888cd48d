"""The times of a candidate that stands in a process of its own."""

import time

from kernelopt.worker import exploring, rates


class Standing(exploring.Contestant):
    """A contestant without a kernel, whose calls change inputs."""

    def __init__(self, calls: list[str]):
        self.calls, self.pristine = calls, [[None]]

    def _call(self, number):
        return lambda: self.calls.append("call")

    def _restore(self, number):
        self.calls.append("restore")


def test_a_sustained_time_is_that_of_a_warm_card_without_the_restoring(monkeypatch):
    began, calls, rounds = time.time(), [], []

    def back_to_back(call, seconds, at_once=1):
        calls.clear()
        call()
        rounds.append((list(calls), seconds, time.time()))
        us = 2.0 if calls == ["restore"] else (40.0, 30.0)[len(rounds) - 1]
        return 1e6 / us

    monkeypatch.setattr(rates, "back_to_back", back_to_back)
    taken = Standing(calls).sustain(0.5)
    assert [(names, seconds) for names, seconds, _ in rounds[:2]] == 2 * [(["restore", "call"], 0.25)]
    assert round(taken.us, 6) == 28.0
    assert began < rounds[0][2] <= taken.window[0] <= rounds[1][2] <= taken.window[1]
