"""The children of a sandbox that are forked ahead: each starts CUDA and waits for the request of its job."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent import futures

from . import gpu
from .child_process import LOOK_EVERY_S
from .fork_server import Child, Server
from .gpu_memory import WAITING_BYTES, WAITING_SHARE

FIRST_READY_S = 10.0  # for the first child to start; after that no others are forked ahead


class ForkedAhead:
    """The children that wait, each for the request of one job. Several threads may take them.

    on_gpu: otherwise none is forked. server: returns the server that they are forked from. ahead: returns how one gets
    ready for a job (Requests.ahead).
    """

    def __init__(self, on_gpu: bool, server: Callable[[], Server], ahead: Callable[[str], dict]):
        self._on_gpu, self._server, self._ahead = on_gpu, server, ahead
        self._waiting: list[tuple[str, Child]] = []
        self._turn = threading.Lock()  # of `take`, which several threads call
        self._forker, self._ending = futures.ThreadPoolExecutor(1), threading.Event()
        self._forking: futures.Future | None = None

    def get_ready(self, *jobs: str) -> None:
        """Fork a child ahead for each of these jobs, those first that are needed most. It starts CUDA and waits for its
        request, so that the job then begins at once. As many wait as the GPU has memory to spare; those whose jobs did
        not come are ended.

        The first starts CUDA alone, in 0.3 s on an H100. Fourteen side by side are all ready after 2.4 s, and none
        before."""
        self.end()
        if wanted := jobs[: self._may_wait()]:
            self._forking = self._forker.submit(self._fork_ahead, self._server(), wanted)

    def _fork_ahead(self, server: Server, jobs: tuple[str, ...]) -> None:
        """Runs in a thread; `_forked` waits for it. If a fork fails, as the server has died or no file handle is left,
        the job later runs in a fresh child, which reports the cause."""
        ends = time.monotonic() + FIRST_READY_S
        with contextlib.suppress(OSError, RuntimeError):
            for number, job in enumerate(jobs):
                while number == 1 and not self._waiting[0][1].until_ready(LOOK_EVERY_S):
                    if self._ending.is_set() or time.monotonic() > ends:
                        return
                self._waiting.append((job, Child(server, ahead=self._ahead(job))))

    def _forked(self) -> list[tuple[str, Child]]:
        """The children that wait, once all are forked."""
        with self._turn:
            forking, self._forking = self._forking, None
            if forking:
                forking.result()
        return self._waiting

    def _may_wait(self) -> int:
        """How many children may be forked ahead: none where there is no GPU, whose start is what that saves."""
        return int(WAITING_SHARE * gpu.shared_bytes() / WAITING_BYTES) if self._on_gpu else 0

    def until_ready(self, job: str) -> int:
        """Wait until no child that was forked ahead still starts. How many processes will use the GPU once the job
        runs: the waiting ones, and its own if that is none of them."""
        for _, child in self._forked():
            child.until_ready()
        return len(self._waiting) + (job not in dict(self._waiting))

    def count(self) -> int:
        """How many children wait for their request."""
        return len(self._forked())

    def take(self, job: str) -> Child | None:
        """A child that was forked ahead for this job and waits. Those that have died are passed over: a fresh one tells
        why."""
        while child := self._taken(job):
            if child.is_ready():
                return child
            child.end()
        return None

    def _taken(self, job: str) -> Child | None:
        """The next child that was forked ahead for this job, which no other thread gets; None where there is none."""
        self._forked()
        with self._turn:
            pair = next((pair for pair in self._waiting if pair[0] == job), None)
            if pair:
                self._waiting.remove(pair)
        return pair and pair[1]

    def end(self) -> int:
        """End the children that wait; how many there were."""
        self._ending.set()
        try:
            ending, self._waiting = self._forked(), []
        finally:
            self._ending.clear()
        with futures.ThreadPoolExecutor() as at_once:
            return len(list(at_once.map(lambda pair: pair[1].end(), ending)))

    def close(self) -> None:
        """From now on none is forked."""
        self._forker.shutdown(wait=False)
