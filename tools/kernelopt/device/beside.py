"""Jobs under a profiler that go on beside others."""

import queue
import subprocess
from collections.abc import Iterable
from concurrent import futures
from pathlib import Path

from .child_process import kill_group
from .outcomes import Outcome
from .sandbox import Sandbox


class Beside:
    """A job under a profiler, the command `prefix`, that goes on while other jobs run. Its process starts at once, and
    the job at `begin`. timeout_s: from then on."""

    def __init__(self, sandbox: Sandbox, prefix: list[str], job: str, timeout_s: float, **environment: str):
        self._sandbox = sandbox
        self._process: subprocess.Popen | None = None
        self._request = queue.SimpleQueue()  # or None, when it is not wanted
        self._thread = futures.ThreadPoolExecutor(1)
        sandbox.beside.append(self)  # which ends it, should nobody else
        self._outcome = self._thread.submit(
            sandbox.run_when_asked, prefix, job, timeout_s, self._asked, ahead=True, **environment
        )

    def _asked(self, process: subprocess.Popen) -> tuple[dict, Iterable[Path | str]] | None:
        self._process = process
        return self._request.get()

    def begin(self, arguments: dict, hidden: Iterable[Path | str]) -> None:
        self._request.put((arguments, hidden))

    def outcome(self, within_s: float) -> Outcome | None:
        """Its outcome, once it has ended; None where that takes longer."""
        try:
            return self._outcome.result(within_s)
        except futures.TimeoutError:
            return None

    def is_running(self) -> bool:
        return not self._outcome.done()

    def end(self) -> None:
        """End its process, if it still runs."""
        self._request.put(None)
        if self._process:
            kill_group(self._process)
        self._thread.shutdown()
        if self in self._sandbox.beside:
            self._sandbox.beside.remove(self)
