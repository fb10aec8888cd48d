"""A command in a child process that leads a session: its start, and the end of the whole session."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from .pipes import Pump, Tail

LOOK_EVERY_S = 0.05  # whether a process that is waited for has died, or the wait is to end


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


def run_to_end(
    command: list[str],
    environment: dict,
    folder: str,
    timeout_s: float,
    started: Callable[[subprocess.Popen], None] = lambda _: None,
) -> tuple[Exit, str]:
    """(how a command ended, the end of its log). All processes of its session are ended with it."""
    process = start_child(command, environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log = Pump(process.stdout, Tail())
    try:
        started(process)
        start = time.monotonic()
        try:
            code, timed_out = process.wait(timeout_s), False
        except subprocess.TimeoutExpired:
            code, timed_out = None, True
    finally:
        kill_group(process)
    log.finish()
    return Exit(code, timed_out, time.monotonic() - start), log.reader.text()
