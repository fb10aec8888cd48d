"""Child processes: the only place that starts GPU work. The parent never imports a candidate."""

import contextlib
import errno
import fcntl
import json
import os
import queue
import re
import secrets
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .. import bundle, intervals
from ..errors import REFUSED_CALL, EnvironmentLacks, UsageError
from ..statuses import Status
from . import gpu, landlock

LOG_TAIL_BYTES = 8000
REPORT_BYTES = 64 << 20
ANSWER_GRACE_S = 30.0  # time to kill a child after its own time limit
# Names of environment variables that a candidate must not see.
SECRETS = re.compile(
    r"(?i)token|secret|passw|credential|api_?key|private|^(aws|azure|google|gcp|ssh|github|gitlab|hf)_"
)
WORKER_PACKAGES = ("torch", "triton", "numpy")
KINDS = ("auto", "bwrap", "landlock", "none")


@dataclass(frozen=True)
class Outcome:
    """How a child ended. result: the report of its job; None when it died before. marks: name -> (seconds on this
    process's clock, calls so far). forged: a message came that the job did not send."""

    result: dict | None
    exit_code: int | None
    signal: str | None
    timed_out: bool
    wall_s: float
    log_tail: str
    marks: dict[str, tuple[float, int]] = field(default_factory=dict)
    forged: bool = False


@dataclass(frozen=True)
class Exit:
    """How a process ended. exit_code: negative for a signal; None when it was still running at its end."""

    exit_code: int | None
    timed_out: bool
    wall_s: float


class Sandbox:
    """A scratch folder with its caches, the device that children run on, and the server that they are forked
    from.

    device: "cuda" (identified through NVML, locked while the sandbox is open) or "cpu-interpreter".
    cache: a folder that outlives the sandbox (a workspace's .cache), or None. kind: "bwrap" puts the children behind
    bubblewrap, with a read-only file system and no network; "landlock" has the kernel refuse their writes; "auto" takes
    the first of the two that works; see `isolation`. Children write in `open` and in the caches. `scratch` holds files
    that they must not change.
    """

    def __init__(self, device: str, cache: Path | None = None, kind: str = "auto"):
        bundle.require(*WORKER_PACKAGES)  # otherwise the kernel would be blamed for their absence
        self.device = device
        self.isolation = isolation(kind)
        self.gpu = gpu.identify() if device == "cuda" else None
        home = cache or Path(tempfile.gettempdir())
        home.mkdir(exist_ok=True)
        remove_abandoned(home)
        self.scratch, self._alive = new_scratch(home)
        self.open = self.scratch / "open"
        self.open.mkdir()
        self.caches = cache or self.open
        self._server: Server | None = None
        self._spans: dict[str, list[intervals.Span]] = {}

    def new_folder(self, name: str) -> str:
        """A fresh folder that children may write in."""
        return tempfile.mkdtemp(prefix=f"{name}-", dir=self.open)

    @contextlib.contextmanager
    def folder(self, name: str):
        """A fresh folder that is removed at the end."""
        folder = self.new_folder(name)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def device_name(self) -> str:
        return self.gpu.name if self.gpu else self.device

    def __enter__(self) -> "Sandbox":
        self._lock = gpu.locked(self.gpu.uuid) if self.gpu else contextlib.nullcontext()
        try:
            self._lock.__enter__()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *exc) -> None:
        self._lock.__exit__(*exc)
        self.remove()

    def remove(self) -> None:
        if self._server:
            self._server.end()
        self._alive.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def note(self, job: str, started: float) -> None:
        """A job that began at this time.monotonic() ends now."""
        self._spans.setdefault(job, []).append((started * 1e6, (time.monotonic() - started) * 1e6))

    def seconds(self) -> dict[str, float]:
        """Time in which at least one process ran a job, by job, the longest first. Jobs may run beside each other."""
        by_job = {job: intervals.busy_us(sorted(spans)) / 1e6 for job, spans in self._spans.items()}
        return dict(sorted(by_job.items(), key=lambda one: -one[1]))

    @contextlib.contextmanager
    def noted(self, job: str):
        started = time.monotonic()
        try:
            yield
        finally:
            self.note(job, started)

    def run(self, job: str, arguments: dict, timeout_s: float, hidden: Iterable[Path | str] = ()) -> Outcome:
        """Run a job of `worker` in a child process. hidden: files that a candidate in it must not open."""
        seal, request = self.request(job, arguments, hidden)
        with self.noted(job), self.folder(job) as folder:
            ended, report, log = self.server().fork(folder, request, seal, timeout_s)
        return self.usable(outcome(ended, report, log))

    def server(self) -> "Server":
        """The server that jobs are forked from; a new one where the former has died."""
        if self._server is None or not self._server.alive():
            self._server = Server(self._wrapper(), self._environment(), self.scratch)
        return self._server

    def fork_server(self, **environment: str) -> "Server":
        """A separate server (worker.server) for jobs that run beside others (standing.py). The caller ends it.
        environment: variables that differ from those of other children."""
        return Server(self._wrapper(), {**self._environment(), **environment}, self.scratch)

    def run_under(
        self,
        prefix: list[str],
        job: str,
        arguments: dict,
        timeout_s: float,
        started: Callable[[subprocess.Popen], None] = lambda _: None,
        hidden: Iterable[Path | str] = (),
        **environment: str,
    ) -> Outcome:
        """Run a job in a process that the command `prefix`, a profiler, starts."""
        seal, request = self.request(job, arguments, hidden)
        with self.noted(Path(prefix[0]).name), self.folder(job) as folder:
            paths = [Path(folder, name) for name in ("request.json", "report")]
            paths[0].write_text(request, encoding="utf-8")
            command = [*self._wrapper(), *prefix, *WORKER, "once", *map(str, paths)]
            ended, log = run_to_end(command, {**self._environment(), **environment}, folder, timeout_s, started)
            report = Report(seal)
            with contextlib.suppress(OSError), open(paths[1], "rb") as file:
                report.take(file.read(REPORT_BYTES + 1))
        return self.usable(outcome(ended, report, log))

    def usable(self, outcome: Outcome) -> Outcome:
        """The outcome; EnvironmentLacks when the child's torch cannot use the GPU (worker.server)."""
        error = outcome.result.get("error") if self.gpu and isinstance(outcome.result, dict) else None
        if isinstance(error, dict) and error.get("status") == Status.NO_GPU:
            raise EnvironmentLacks(f"the GPU is {self.gpu.name}, driver {self.gpu.driver}; {error['message']}")
        return outcome

    def request(self, job: str, arguments: dict, hidden: Iterable[Path | str]) -> tuple[str, str]:
        """(seal that the answer must carry, text of the request)"""
        seal = secrets.token_hex(16)
        rules = {"writable": self._writable(), "hidden": [str(path) for path in hidden]}
        device = "cuda" if self.gpu else "cpu"
        confined = self.isolation == "landlock"
        request = {
            "seal": seal,
            "job": job,
            "device": device,
            "rules": rules,
            "confined": confined,
            "arguments": arguments,
        }
        return seal, json.dumps(request, allow_nan=False)

    def _writable(self) -> list[str]:
        return [str(self.open), str(self.caches)]

    def _wrapper(self) -> list[str]:
        """bubblewrap's command: everything read-only but the scratch folder and the caches, no network, no other
        processes; nothing survives its parent."""
        if self.isolation != "bwrap":
            return []
        open_folders = [part for folder in self._writable() for part in ("--bind", folder, folder)]
        shared_memory = ["--bind", "/dev/shm", "/dev/shm"] if Path("/dev/shm").is_dir() else []
        base = [*BWRAP, "--dev-bind", "/dev", "/dev", *shared_memory, "--proc", "/proc"]
        return [*base, *open_folders, "--unshare-net", "--unshare-pid", "--die-with-parent", "--"]

    def _environment(self) -> dict[str, str]:
        """The caller's environment without its secrets, with home, temporary files and compiler caches in this
        sandbox."""
        caches = {
            name: str(self.caches / folder)
            for name, folder in {
                "TRITON_CACHE_DIR": "triton",
                "TORCHINDUCTOR_CACHE_DIR": "inductor",
                "TORCH_EXTENSIONS_DIR": "extensions",
                "CUDA_CACHE_PATH": "cuda",
            }.items()
        }
        for name in ("home", "tmp"):
            (self.open / name).mkdir(exist_ok=True)
        folders = {"HOME": str(self.open / "home"), "TMPDIR": str(self.open / "tmp")}
        python = {"PYTHONPATH": bundle.python_path()}
        python["PYTHONUSERBASE"] = site.getuserbase()  # packages under the user's home stay importable
        harmless = {name: value for name, value in os.environ.items() if not SECRETS.search(name)}
        environment = {**harmless, **caches, **folders, **python}
        environment.pop("PYTHONSAFEPATH", None)
        environment["TRITON_INTERPRET"] = "0" if self.gpu else "1"
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, so that the GPU that is locked is used
        return environment


class Beside:
    """A call of Sandbox.run_under that goes on in a thread, so that other jobs can run meanwhile."""

    def __init__(self, sandbox: Sandbox, prefix: list[str], job: str, arguments: dict, timeout_s: float, **environment):
        self._processes: list[subprocess.Popen] = []
        self._thread = futures.ThreadPoolExecutor(1)
        self._outcome = self._thread.submit(
            sandbox.run_under, prefix, job, arguments, timeout_s, self._processes.append, **environment
        )

    def outcome(self) -> Outcome:
        """Its outcome, once it has ended."""
        return self._outcome.result()

    def end(self) -> None:
        """End its process, if it still runs."""
        for process in self._processes:
            kill_group(process)
        self._thread.shutdown()


WORKER = [sys.executable, "-m", "kernelopt.worker"]
BWRAP = ["bwrap", "--ro-bind", "/", "/"]


def isolation(kind: str) -> str:
    """ "bwrap", "landlock" or "none" for a value of --sandbox. EnvironmentLacks when the demanded one does not work."""
    if kind not in KINDS:
        raise UsageError(f"--sandbox is one of {', '.join(KINDS)}")
    if kind == "none":
        return "none"
    if kind != "landlock":
        if not (lacking := why_no_bubblewrap()):
            return "bwrap"
        if kind == "bwrap":
            raise EnvironmentLacks(f"bubblewrap does not work here ({lacking}); install it, or pass --sandbox auto")
    if landlock.version():
        return "landlock"
    if kind == "landlock":
        raise EnvironmentLacks(
            "this kernel has no Landlock (Linux 5.13 has it, unless switched off); pass --sandbox auto"
        )
    return "none"


def why_no_bubblewrap() -> str | None:
    if shutil.which("bwrap") is None:
        return "no bwrap on the PATH"
    done = subprocess.run([*BWRAP, "--unshare-net", "--unshare-pid", "--", "true"], capture_output=True, text=True)
    return done.stderr.strip() or f"exit {done.returncode}" if done.returncode else None


def outcome(ended: Exit, report: "Report", log: str) -> Outcome:
    code = ended.exit_code
    return Outcome(
        result=report.result,
        exit_code=code if code is not None and code >= 0 else None,
        signal=signal_name(-code) if code is not None and code < 0 and not ended.timed_out else None,
        timed_out=ended.timed_out,
        wall_s=round(ended.wall_s, 3),
        log_tail=log,
        marks=report.marks,
        forged=report.forged or report.unfinished(),
    )


def start_child(command: list[str], environment: dict, **options) -> subprocess.Popen:
    """A process that leads a new session."""
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def run_to_end(
    command: list[str],
    environment: dict,
    folder: str,
    timeout_s: float,
    started: Callable[[subprocess.Popen], None] = lambda _: None,
) -> tuple[Exit, str]:
    """(how a command ended, the end of its log). All processes of its session are ended with it."""
    start = time.monotonic()
    process = start_child(command, environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started(process)
    log = Pump(process.stdout, Tail())
    try:
        code, timed_out = process.wait(timeout_s), False
    except subprocess.TimeoutExpired:
        code, timed_out = None, True
    finally:
        kill_group(process)
    log.finish()
    return Exit(code, timed_out, time.monotonic() - start), log.reader.text()


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


def new_scratch(home: Path) -> tuple[Path, IO]:
    """A new folder in `home`, and a locked file in it, which shows other processes that this one lives. The file is
    locked before the folder gets the name that `remove_abandoned` of another process looks for."""
    unnamed = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
    alive = open(unnamed / "alive", "w")  # noqa: SIM115 (held as long as the sandbox lives)
    fcntl.flock(alive, fcntl.LOCK_EX)
    scratch = home / f"kernelopt-{unnamed.name.removeprefix('.new-')}"
    return unnamed.rename(scratch), alive


def remove_abandoned(home: Path) -> None:
    """Remove scratch folders of processes that were killed before they could do it."""
    for mark in home.glob("kernelopt-*/alive"):
        with contextlib.suppress(OSError), open(mark) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living owner holds it
            shutil.rmtree(mark.parent, ignore_errors=True)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kill_group(process: subprocess.Popen) -> None:
    """End the child and all processes of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: bytes) -> str:
    lines = [line.strip() for line in log.decode("utf-8", "replace").splitlines()]
    return next(filter(None, reversed(lines)), "it left no message")


class Report:
    """The messages of a job. A line holds its seal and a JSON object: a mark, an answer or the result. Any other line
    is a forgery."""

    def __init__(self, seal: str):
        self._seal, self._rest, self._size = f"{seal} ".encode(), b"", 0
        self.result: dict | None = None
        self.marks: dict[str, tuple[float, int]] = {}
        self.answers: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self.forged = False

    def take(self, piece: bytes) -> None:
        now = time.monotonic()
        self._size += len(piece)
        if self._size > REPORT_BYTES:
            self.forged = True
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line, now)

    def unfinished(self) -> bool:
        """Is there an unfinished line that does not begin with the seal?"""
        return bool(self._rest) and not self._rest.startswith(self._seal[: len(self._rest)])

    def _line(self, line: bytes, now: float) -> None:
        try:
            message = bundle.loads(line.removeprefix(self._seal).decode())
            sound = line.startswith(self._seal) and sum(kind in message for kind in ("mark", "answer", "result")) == 1
        except (ValueError, TypeError):
            sound = False
        if not sound or self.result is not None:
            self.forged = True
        elif "mark" in message:
            self.marks.setdefault(message["mark"], (now, message["calls"]))
        elif "answer" in message:
            self.answers.put(message["answer"])
        else:
            self.result = message["result"]


class Tail:
    """The end of a child's output. It is read as it comes, so a kernel that prints without end fills no memory."""

    def __init__(self):
        self._tail = b""

    def take(self, piece: bytes) -> None:
        self._tail = (self._tail + piece)[-LOG_TAIL_BYTES:]

    def text(self) -> str:
        return self._tail.decode("utf-8", "replace")


class Pump:
    """A thread that reads a pipe to its end and hands each piece to a reader."""

    GRACE_S = 2.0  # a process that escaped may hold the pipe open

    def __init__(self, stream, reader):
        self.reader, self._stream = reader, stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while piece := os.read(self._stream.fileno(), 1 << 16):
                self.reader.take(piece)

    def finish(self) -> None:
        self._thread.join(self.GRACE_S)

    @staticmethod
    def feeding(stream, content: bytes) -> threading.Thread:
        """A thread that writes `content` to a process, which may ignore it or die meanwhile."""

        def feed() -> None:
            with contextlib.suppress(OSError), stream:
                stream.write(content)

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        return thread


def pumped(reader) -> tuple[Pump, int]:
    """A pipe that feeds `reader`, and the handle to write to it."""
    read, write = os.pipe()
    return Pump(os.fdopen(read, "rb", buffering=0), reader), write
