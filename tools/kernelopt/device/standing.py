"""Child processes that stay: each takes orders and answers them, beside others, until it ends.

A standing process is forked from a server that has torch imported (worker.server), so starting one costs a fork; one
that Sandbox.forked_ahead holds has started CUDA too. It is killed when its deadline passes, when `end` is called,
and when this process dies. Once the sandbox's `stop` was signalled, none is started, ordered or waited for: Stopped.
"""

import contextlib
import json
import os
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .child_process import LOOK_EVERY_S
from .fork_server import Child, Server
from .outcomes import Outcome, outcome
from .pipes import Report
from .sandbox import Sandbox


@dataclass(frozen=True)
class Job:
    """A job of `worker` that needs no orders: the arguments of Sandbox.run."""

    name: str
    arguments: dict
    timeout_s: float
    hidden: Iterable[Path | str] = ()


def side_by_side(sandbox: Sandbox, jobs: list[Job]) -> list[Outcome]:
    """How the jobs of one name ended, which run at the same time, each in a process. A single job runs as by
    Sandbox.run."""
    if len(jobs) == 1:
        return [sandbox.run(jobs[0].name, jobs[0].arguments, jobs[0].timeout_s, jobs[0].hidden)]
    running = [Standing(sandbox, sandbox.server(), job.name, job.arguments, job.timeout_s, job.hidden) for job in jobs]
    sandbox.note_reports(jobs[0].name, *(process.report for process in running))
    try:
        return [process.wait() for process in running]
    finally:
        with ThreadPoolExecutor() as pool:  # one that uses the GPU takes its time to end
            list(pool.map(lambda process: process.end(), running))


class Ended(Exception):
    """The process ended, or did not answer in time. outcome: how it ended."""

    def __init__(self, ended: Outcome):
        super().__init__(ended.log_tail)
        self.outcome = ended


class Standing:
    """One job of `worker` in a process that stays. timeout_s: the process is killed after this time. environment:
    variables that differ from the server's. off_gpu: it leaves the GPU alone."""

    def __init__(
        self,
        sandbox: Sandbox,
        server: Server,
        job: str,
        arguments: dict,
        timeout_s: float,
        hidden: Iterable[Path | str] = (),
        environment: dict[str, str] | None = None,
        off_gpu: bool = False,
    ):
        sandbox.stop.check()
        self._sandbox, self._job = sandbox, job
        self.folder = sandbox.new_folder(job)
        self._started = time.monotonic()
        self._outcome: Outcome | None = None
        ready = None if environment else sandbox.forked_ahead.take(job)
        self._child = ready or Child(server, timeout_s, environment)
        request = sandbox.requests.text(self._child.seal, self.folder, job, arguments, hidden, off_gpu)
        self._child.begin(request, timeout_s)

    @property
    def report(self) -> Report:
        """What it has reported so far."""
        return self._child.report

    def order(self, **order) -> None:
        """Send an order. Ended when the process was ended: its handle may belong to another file by now."""
        self._sandbox.stop.check()
        if self._outcome is not None:
            raise Ended(self._outcome)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._child.orders, json.dumps(order).encode() + b"\n")

    def answer(self, timeout_s: float | Callable[[], float]) -> dict:
        """The next answer. Ended when none comes in time, or the process has ended. timeout_s: seconds, or a
        function that gives them anew while this waits."""
        began, answers = time.monotonic(), self._child.answers
        while True:
            limit_s = timeout_s() if callable(timeout_s) else timeout_s
            until = min(began + limit_s, self._child.ends)
            self._sandbox.stop.check()
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=LOOK_EVERY_S)
            if (self._outcome is not None or self._child.has_ended()) and answers.empty():
                ended = self.end()  # the last answer may have been on its way
                with contextlib.suppress(queue.Empty):
                    return answers.get_nowait()
                raise Ended(ended)
            if time.monotonic() > until:
                raise Ended(self.end(timed_out=True))

    def ask(self, timeout_s: float, **order) -> dict:
        """The answer to an order. Each job defines its orders and answers, which are JSON objects."""
        self.order(**order)
        return self.answer(timeout_s)

    def wait(self) -> Outcome:
        """The outcome, once the process has ended by itself or by its time limit."""
        self._child.wait()
        return self._sandbox.usable(self.end(timed_out=True))

    def end(self, timed_out: bool = False) -> Outcome:
        """End the process, if it still runs, and return its outcome."""
        if self._outcome is None:
            self._sandbox.spent.note(self._job, self._started)
            self._outcome = outcome(*self._child.end(timed_out))
        return self._outcome
