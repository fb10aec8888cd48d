"""The process that children are forked from (worker.server), and the socket to it."""

import contextlib
import errno
import json
import math
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import REFUSED_CALL, EnvironmentLacks
from .child_process import Exit, kill_group, start_child
from .pipes import Pump, Report, Tail, last_line, pumped

KILLED = json.dumps({"exit_code": -signal.SIGKILL, "timed_out": False})
ANSWER_GRACE_S = 30.0  # time to kill a child after its own time limit
WORKER = [sys.executable, "-m", "kernelopt.worker"]


class Server:
    """The process that children are forked from (worker.server), and the socket to it."""

    def __init__(self, wrapper: list[str], environment: dict, folder: Path):
        self._socket, theirs = socket.socketpair()
        command = [*wrapper, *WORKER, "serve", str(theirs.fileno())]
        log = open(folder / "server.log", "w+b")  # noqa: SIM115 (read when the server dies)
        self._log = log
        self._process = start_child(
            command, environment, cwd=folder, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._has_answered = False
        self._turn = threading.Lock()

    def alive(self) -> bool:
        return self._process.poll() is None

    def split(self) -> socket.socket:
        """A socket to a fork of the server, which serves it alone. Closing the socket ends that fork and its job."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self._socket, [json.dumps({"split": True}).encode()], [theirs.fileno()])
        theirs.close()
        return ours

    def end(self) -> None:
        self._socket.close()
        kill_group(self._process)
        self._log.close()

    def fork(
        self, request: str, seal: str, timeout_s: float, started: Callable[[Report], None] = lambda _: None
    ) -> tuple[Exit, Report, str]:
        """(how a fresh child ended, the report of its job, the end of its log). Of several threads, one at a time.
        started: gets the report, which grows, when the child is asked for."""
        with self._turn:
            start = time.monotonic()
            paper = os.memfd_create("request")
            os.write(paper, request.encode())
            os.lseek(paper, 0, os.SEEK_SET)
            report, log = send_job(self._socket, paper, seal, {"timeout_s": timeout_s})
            started(report.reader)
            ended = self._answer(timeout_s) or Exit(-signal.SIGKILL, False, time.monotonic() - start)
        report.finish()
        log.finish()
        return ended, report.reader, log.reader.text()

    def _answer(self, timeout_s: float) -> Exit | None:
        """How a child ended, by the server's answer; None when the server itself is gone.

        EnvironmentLacks when it has never answered: no candidate has run yet that could have ended it.
        """
        line = b""
        with contextlib.suppress(ConnectionResetError):
            line = self._socket.recv(1 << 16) if readable(self._socket, timeout_s + ANSWER_GRACE_S) else b""
        if line:
            self._has_answered = True
            return Exit(**json.loads(line))
        kill_group(self._process)
        if not self._has_answered:
            self._log.seek(0)
            said = last_line(self._log.read())
            sandboxed = f"; {REFUSED_CALL}" if said.endswith(os.strerror(errno.EPERM)) else ""
            raise EnvironmentLacks(f"the worker does not start: {said}{sandboxed}")
        return None


class Child:
    """A child that a fork of the server serves alone, so that it runs beside others and can be ended at any time. Its
    request comes with `begin`.

    timeout_s: the server ends it after this time. ahead: how it gets ready for its request (worker.server._get_ready);
    None for a child whose request comes at once.
    """

    def __init__(
        self,
        server: Server,
        timeout_s: float = math.inf,
        environment: dict[str, str] | None = None,
        ahead: dict | None = None,
    ):
        self.seal, self._started, self.ends = secrets.token_hex(16), time.monotonic(), math.inf
        self._control = server.split()
        self._line, theirs = socket.socketpair()  # which no other process can open, as it could a pipe in /proc
        orders, self.orders = os.pipe()
        message = {"timeout_s": timeout_s, "environment": environment or {}, "ahead": ahead}
        self._report, self._log = send_job(self._control, theirs.detach(), self.seal, message, orders)
        self.report = self._report.reader
        self.answers = self.report.answers

    def until_ready(self, within_s: float = ANSWER_GRACE_S) -> bool:
        """Wait until a child that was forked ahead is ready, or has ended; False when the time was over before."""
        return readable(self._line, within_s)

    def is_ready(self) -> bool:
        """Does it wait for its request? To be asked once, of a child that was forked ahead."""
        self.until_ready()
        return readable(self._line) and self._line.recv(1) != b"" and not readable(self._line)  # which its end would be

    def begin(self, request: str, timeout_s: float) -> None:
        """Give it its request. Its time limit counts from now."""
        self._started = time.monotonic()
        self.ends = self._started + timeout_s
        Pump.feeding(os.fdopen(self._line.detach(), "wb"), request.encode())

    def run(self, request: str, timeout_s: float) -> tuple[Exit, Report, str]:
        """What Server.fork returns, of a job in this child."""
        self.begin(request, timeout_s)
        self.wait()
        return self.end(timed_out=True)

    def wait(self) -> None:
        """Wait until it has ended, or its time is over."""
        readable(self._control, max(0.0, self.ends - time.monotonic()))

    def has_ended(self) -> bool:
        return readable(self._control)

    def _last_answer(self) -> bytes:
        with contextlib.suppress(ConnectionResetError):
            return self._control.recv(1 << 16)
        return b""

    def end(self, timed_out: bool = False) -> tuple[Exit, Report, str]:
        """(how it ended, the report of its job, the end of its log). A child that still runs is killed; timed_out: for
        taking too long."""
        answer = {"exit_code": None, "timed_out": timed_out}
        if self.has_ended():
            answer = json.loads(self._last_answer() or KILLED)  # none where the server was killed
        for ours in (self._control, self._line):
            ours.close()
        with contextlib.suppress(OSError):
            os.close(self.orders)
        self._report.finish()
        self._log.finish()
        ended = Exit(**{**answer, "wall_s": time.monotonic() - self._started})  # the server's own begins elsewhere
        return ended, self._report.reader, self._log.reader.text()


def readable(line: socket.socket, within_s: float = 0) -> bool:
    """Is there something to be read in this time, or has the other end been closed?"""
    return bool(select.select([line], [], [], within_s)[0])


def send_job(line: socket.socket, request: int, seal: str, message: dict, *orders: int) -> tuple[Pump, Pump]:
    """(pump of the report, pump of the log) of a child that the server at the other end of `line` forks for a job.

    request: a file that the child reads to its end. message: as worker.server.serve takes it. orders: the end of a pipe
    that the child reads. These files are closed here. A dead server leaves both pumps empty.
    """
    (report, channel), (log, output) = (pumped(reader) for reader in (Report(seal), Tail()))
    theirs = [request, channel, output, *orders]
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(line, [json.dumps(message).encode()], theirs)
    finally:
        for handle in theirs:
            os.close(handle)
    return report, log
