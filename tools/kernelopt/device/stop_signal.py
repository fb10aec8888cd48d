"""An end from outside, by `timeout` or Ctrl-C, of a command that then prints what it has."""

import contextlib
import sys
import time
from collections.abc import Iterator

from ..errors import Stopped

SAME_S = 1.0  # `timeout` sends its signal to the process and to its group: two within this time are one


class Stop:
    """The first signal that `signalled` handles. after_s: when it came, in seconds from the start; None before.

    interrupts: it raises Stopped in the main thread, wherever that is. Otherwise `check` raises it from then on, which
    whoever begins work or waits for it calls.
    """

    def __init__(self):
        self._began, self.after_s, self.interrupts = time.monotonic(), None, True

    def signalled(self, number: int, _) -> None:
        """A handler of signals. A second one ends this process at once."""
        now_s = time.monotonic() - self._began
        if self.after_s is None:
            self.after_s = now_s
            if self.interrupts:
                self.check()
        elif now_s > self.after_s + SAME_S:
            sys.exit(128 + number)

    def check(self) -> None:
        if self.after_s is not None:
            raise Stopped(f"stopped after {self.after_s:.0f} s")

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """The signal interrupts what runs in the block. Stopped when it came before."""
        self.interrupts = True
        try:
            self.check()
            yield
        finally:
            self.interrupts = False
