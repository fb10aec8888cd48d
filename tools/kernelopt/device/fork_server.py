"""The process that children are forked from (worker.server), and the socket to it."""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import REFUSED_CALL, EnvironmentLacks
from .pipes import Pump, Report, Tail, last_line, pumped

ANSWER_GRACE_S = 30.0  # time to kill a child after its own time limit
WORKER = [sys.executable, "-m", "kernelopt.worker"]


@dataclass(frozen=True)
class Exit:
    """How a process ended. exit_code: negative for a signal; None when it was still running at its end."""

    exit_code: int | None
    timed_out: bool
    wall_s: float


def start_child(command: list[str], environment: dict, **options) -> subprocess.Popen:
    """A process that leads a new session."""
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def kill_group(process: subprocess.Popen) -> None:
    """End the child and all processes of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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

    def fork(self, folder: str, request: str, seal: str, timeout_s: float) -> tuple[Exit, "Report", str]:
        """(how a fresh child ended, the report of its job, the end of its log)"""
        start = time.monotonic()
        report, log = send_job(self._socket, request, seal, {"folder": folder, "timeout_s": timeout_s})
        ended = self._answer(timeout_s) or Exit(-signal.SIGKILL, False, time.monotonic() - start)
        report.finish()
        log.finish()
        return ended, report.reader, log.reader.text()

    def _answer(self, timeout_s: float) -> Exit | None:
        """How a child ended, by the server's answer; None when the server itself is gone.

        EnvironmentLacks when it has never answered: no candidate has run yet that could have ended it.
        """
        ready, _, _ = select.select([self._socket], [], [], timeout_s + ANSWER_GRACE_S)
        line = b""
        with contextlib.suppress(ConnectionResetError):
            line = self._socket.recv(1 << 16) if ready else b""
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


def send_job(line: socket.socket, request: str, seal: str, message: dict, *orders: int) -> tuple["Pump", "Pump"]:
    """(pump of the report, pump of the log) of a child that the server at the other end of `line` forks for a job.

    message: as worker.server.serve takes it. orders: the end of a pipe that the child reads; it is closed here. A dead
    server leaves both empty.
    """
    paper = os.memfd_create("request")
    os.write(paper, request.encode())
    os.lseek(paper, 0, os.SEEK_SET)
    (report, channel), (log, output) = (pumped(reader) for reader in (Report(seal), Tail()))
    theirs = [paper, channel, output, *orders]
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(line, [json.dumps(message).encode()], theirs)
    finally:
        for handle in theirs:
            os.close(handle)
    return report, log
