"""Standing processes: an answer that the process left on its way out still counts."""

import math
import os
import queue
from types import SimpleNamespace

import pytest
from kernelopt.device import standing
from kernelopt.device.stop_signal import Stop


class Leaving(standing.Standing):
    """A stand-in for a process that has ended while its last answers are still in the pipe."""

    def __init__(self, answers: list[dict]):
        self._left, self._outcome, self._sandbox = answers, None, SimpleNamespace(stop=Stop())
        self._child = SimpleNamespace(answers=queue.Queue(), has_ended=lambda: True, ends=math.inf)

    def end(self, timed_out: bool = False):
        for answer in self._left if self._outcome is None else ():
            self._child.answers.put(answer)
        self._outcome = SimpleNamespace(log_tail="")
        return self._outcome


def test_an_answer_that_was_on_its_way_is_not_lost():
    process = Leaving([{"status": "OK"}])
    assert process.answer(5) == {"status": "OK"}
    with pytest.raises(standing.Ended):
        process.answer(5)


def test_a_limit_that_becomes_shorter_holds_for_those_that_wait_already():
    process, limits = Leaving([]), iter([60.0, 60.0, 0.1])
    process._child.has_ended = lambda: False
    with pytest.raises(standing.Ended):
        process.answer(lambda: next(limits, 0.1))


def test_a_process_that_ends_without_an_answer_has_ended():
    with pytest.raises(standing.Ended):
        Leaving([]).answer(5)


def test_an_order_to_a_process_that_was_ended_reaches_no_other_file():
    process = Leaving([])
    ended = process.end()
    read, process._child.orders = os.pipe()  # the handle, taken by another file since
    with pytest.raises(standing.Ended) as refused:
        process.order(do="time")
    os.close(process._child.orders)
    with open(read, "rb") as pipe:
        assert refused.value.outcome is ended and pipe.read() == b""
