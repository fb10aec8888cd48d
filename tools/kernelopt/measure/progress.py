"""How far a verification has come. It says so while it takes long, and to whoever stops it.

Each process of a step marks the case that it begins; the parent reads these marks as they come (device/pipes.py).
"""

import threading
import time
from collections.abc import Callable, Iterable

from ..device.pipes import Report
from ..device.sandbox import Sandbox
from ..errors import Stopped

EVERY_S = 20.0
SAID = {  # of the steps of a verification: each a job of the worker, and the wait for compute-sanitizer
    "prepare": "its inputs are being made",
    "run": "{over} of {cases} cases have run",
    "memcheck": "{cases} of {cases} cases have run, and compute-sanitizer still watches a call",
    "check": "the oracle has compared {over} of {cases} cases",
}


class Progress:
    """Inside, `say` gets a line every EVERY_S seconds, and a stop tells how far it came."""

    def __init__(self, sandbox: Sandbox, say: Callable[[str], None]):
        self._sandbox, self.say = sandbox, say
        self._step, self._cases = "prepare", 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._say_now_and_then, daemon=True)

    def begin(self, step: str, cases: int) -> None:
        """A step begins, of so many cases."""
        self._sandbox.reports.pop(step, None)  # of former processes
        self._step, self._cases = step, cases

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._is_over.set()
        self._thread.join()
        if isinstance(error, Stopped):
            raise Stopped(f"{error}, while verifying ({self._words()})") from None

    def _words(self) -> str:
        return words(self._step, self._cases, self._sandbox.reports.get(self._step, []), time.monotonic())

    def _say_now_and_then(self) -> None:
        began = time.monotonic()
        while not self._is_over.wait(EVERY_S):
            self.say(f"verifying for {time.monotonic() - began:.0f} s: {self._words()}")


def words(step: str, cases: int, reports: Iterable[Report], now: float) -> str:
    """What a step of so many cases has done by now, on the clock of the reports of its processes."""
    counted = [begun_at(report) for report in reports]
    over = sum(len(begun) - (not has_ended and bool(begun)) for begun, has_ended in counted)
    text = SAID[step].format(over=over, cases=cases)
    latest = max((at for begun, has_ended in counted if not has_ended for at in begun), default=None)
    return text if latest is None else f"{text}, the latest one began {now - latest:.0f} s ago"


def begun_at(report: Report) -> tuple[list[float], bool]:
    """(when each case began that the process has begun, whether it has ended all of them)"""
    marks = list(report.marks.items())  # in one step: another thread adds to them
    return [at for name, (at, _) in marks if name.startswith("case ")], report.result is not None
