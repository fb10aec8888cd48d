"""An agent's command as a process: its time limit, its child processes, and the folder that is read-only for it."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ..device.child_process import kill_group
from ..device.pipes import Pump, Tail
from ..errors import UsageError
from ..session.git_commands import environment_without_git

ENDING_S = 5  # seconds in which everything that an agent started must have ended
LONGEST_LINE = 1 << 20  # bytes; an event of a client holds what a tool printed
MARK = "KERNELOPT_AGENT"  # an environment variable of every process that an agent starts


def run(
    command: str,
    brief: str,
    folder: Path,
    timeout_s: float,
    mark: str,
    wrapper: tuple[str, ...] = (),
    ends: Callable[[str], bool] = lambda line: False,
    **variables: str,
) -> tuple[int | None, str, float]:
    """Run a shell command with the brief on stdin: (exit code, or None after a time-out; end of its output; seconds).

    mark: lets `end_marked` find its child processes. wrapper: see `read_only`. ends: gets each line of the output as it
    comes; when it returns True the command is killed. variables: more of its environment.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        [*wrapper, "bash", "-c", command],
        cwd=folder,
        env={**environment_without_git(), **variables, MARK: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    log = Pump(process.stdout, LinesAndTail(lambda line: ends(line) and kill_group(process)))
    feeder = Pump.feeding(process.stdin, brief.encode(errors="replace"))
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_group(process)
        end_marked(mark)
    feeder.join(Pump.GRACE_S)
    log.finish()
    return code, log.reader.text(), time.monotonic() - start


class LinesAndTail(Tail):
    """The end of an output, whose lines are handed on as they come; of a longer one the first LONGEST_LINE bytes."""

    def __init__(self, take_line: Callable[[str], object]):
        super().__init__()
        self._take_line, self._line = take_line, b""

    def take(self, piece: bytes) -> None:
        super().take(piece)
        first, *others = piece.split(b"\n")
        self._line = (self._line + first)[:LONGEST_LINE]
        for start in others:
            self._take_line(self._line.decode("utf-8", "replace"))
            self._line = start[:LONGEST_LINE]


def read_only(folder: Path) -> tuple[str, ...]:
    """A command prefix that makes `folder` read-only; () where bubblewrap is absent or does not work."""
    wrapper = ("bwrap", "--dev-bind", "/", "/", "--ro-bind", str(folder), str(folder), "--")
    if shutil.which("bwrap") is None:
        return ()
    works = subprocess.run([*wrapper, "true"], capture_output=True).returncode == 0
    return wrapper if works else ()


def end_marked(mark: str) -> None:
    """Kill every process whose mark is `mark` or begins with `mark`/, in any session."""
    deadline = time.monotonic() + ENDING_S
    while time.monotonic() < deadline:
        marked = [pid for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")) if is_marked(pid, mark)]
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not marked:
            return
        time.sleep(0.02)
    raise UsageError(
        "processes that an agent started make new ones faster than they can be ended "
        f"({marked[0]}, for example); end them, then --resume"
    )


def is_marked(pid: int, mark: str) -> bool:
    """Whether a living process has this mark, or one that begins with `mark`/."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # a zombie's is empty
    except OSError:
        return False
    entry = os.fsencode(f"{MARK}={mark}")
    return any(variable == entry or variable.startswith(entry + b"/") for variable in environment)
