"""Child processes: the only place that starts GPU work. The parent never imports a candidate."""

import contextlib
import fcntl
import functools
import json
import os
import queue
import re
import secrets
import shutil
import signal
import site
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .. import bundle, byte_code
from ..errors import EnvironmentLacks, UsageError
from ..statuses import Status
from . import gpu, gpu_lock
from .fork_server import WORKER, Child, Exit, Server, kill_group, start_child
from .gpu_memory import WAITING_BYTES, WAITING_SHARE
from .isolation import BWRAP, isolation
from .landlock import SHARED_MEMORY
from .pipes import REPORT_BYTES, Pump, Report, Tail
from .spent import Spent
from .stop_signal import Stop

# Names of environment variables that a candidate must not see.
SECRETS = re.compile(
    r"(?i)token|secret|passw|credential|api_?key|private|^(aws|azure|google|gcp|ssh|github|gitlab|hf)_"
)
WORKER_PACKAGES = ("torch", "triton", "numpy")
LOOK_EVERY_S = 0.05  # whether a process that is waited for has died, or the wait is to end
FIRST_READY_S = 10.0  # for the first child to start; after that no others are forked ahead
REMOVERS, LARGE_BYTES = 8, 64 << 20  # files of that size at a time


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


class Sandbox:
    """A scratch folder with its caches, the device that children run on, and the server that they are forked
    from.

    device: "cuda" (identified through NVML, locked while the sandbox is open) or "cpu-interpreter". cache: a folder
    that outlives the sandbox (a workspace's .cache), or None. kind: "bwrap" puts the children behind bubblewrap, with a
    read-only file system and no network; "landlock" has the kernel refuse their writes; "auto" takes the first of the
    two that works; see `isolation`. Children write in `open` and in the caches. `scratch` holds files that they must
    not change. stop: ends the processes of standing.py. wait_s: for the GPU's lock, see gpu_lock. reports: by job,
    those of its latest processes, which grow while they run.
    """

    def __init__(
        self,
        device: str,
        cache: Path | None = None,
        kind: str = "auto",
        stop: Stop | None = None,
        wait_s: float = gpu_lock.WAIT_S,
    ):
        bundle.require(*WORKER_PACKAGES)  # otherwise the kernel would be blamed for their absence
        self.device, self.stop, self._wait_s = device, stop or Stop(), wait_s
        self.isolation = isolation(kind)
        self.gpu = gpu.identify() if device == "cuda" else None
        home = cache or Path(tempfile.gettempdir())
        refuse_shared_memory(home)
        home.mkdir(exist_ok=True)
        remove_abandoned(home)
        self.scratch, self._alive = new_scratch(home)
        self.open = self.scratch / "open"
        self.open.mkdir()
        self.caches = cache or self.open
        self._server: Server | None = None
        self._waiting: list[tuple[str, Child]] = []
        self._turn = threading.Lock()  # of `waiting_child`, which several threads call
        self._forker, self._ending = futures.ThreadPoolExecutor(1), threading.Event()
        self._forking: futures.Future | None = None
        self.beside: list[Beside] = []  # those that have not been ended
        self.spent = Spent()
        self.reports: dict[str, list[Report]] = {}

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
            remove_tree(folder)

    @property
    def device_name(self) -> str:
        return self.gpu.name if self.gpu else self.device

    def __enter__(self) -> "Sandbox":
        self._lock = gpu_lock.locked(self.gpu.uuid, self._wait_s) if self.gpu else contextlib.nullcontext()
        try:
            self._lock.__enter__()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *exc) -> None:
        for one in list(self.beside):  # while the GPU is locked: they use it
            one.end()
        self.end_waiting()
        self._lock.__exit__(*exc)
        self.remove()

    def remove(self) -> None:
        self._forker.shutdown(wait=False)
        if self._server:
            self._server.end()
        self._alive.close()
        remove_tree(self.scratch)

    def seconds(self) -> dict[str, float]:
        """Time in which at least one process ran a job, by job, the longest first."""
        return dict(sorted(self.spent.seconds().items(), key=lambda one: -one[1]))

    def run(self, job: str, arguments: dict, timeout_s: float, hidden: Iterable[Path | str] = ()) -> Outcome:
        """Run a job of `worker` in a child process. hidden: files that a candidate in it must not open."""
        with self.spent.noted(job), self.folder(job) as folder:
            ready = self.waiting_child(job)
            seal = ready.seal if ready else secrets.token_hex(16)
            request = self.request(seal, folder, job, arguments, hidden)
            if ready:
                self.note_reports(job, ready.report)
                ended = ready.run(request, timeout_s)
            else:
                ended = self.server().fork(request, seal, timeout_s, functools.partial(self.note_reports, job))
        return self.usable(outcome(*ended))

    def note_reports(self, job: str, *reports: Report) -> None:
        """The latest processes of a job, which run at the same time, report here."""
        self.reports[job] = list(reports)

    def get_ready(self, *jobs: str) -> None:
        """Fork a child ahead for each of these jobs, those first that are needed most. It starts CUDA and waits for its
        request, so that the job then begins at once. As many wait as the GPU has memory to spare; those whose jobs did
        not come are ended.

        The first starts CUDA alone, in 0.3 s on an H100. Fourteen side by side are all ready after 2.4 s, and none
        before."""
        self.end_waiting()
        if wanted := jobs[: self._may_wait()]:
            self._forking = self._forker.submit(self._fork_ahead, self.server(), wanted)

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
        return int(WAITING_SHARE * gpu.shared_bytes() / WAITING_BYTES) if self.gpu else 0

    def until_ready(self, job: str) -> int:
        """Wait until no child that was forked ahead still starts. How many processes will use the GPU once the job
        runs: the waiting ones, and its own if that is none of them."""
        for _, child in self._forked():
            child.until_ready()
        return len(self._waiting) + (job not in dict(self._waiting))

    def waiting(self) -> int:
        """How many children wait for their request."""
        return len(self._forked())

    def waiting_child(self, job: str) -> Child | None:
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

    def end_waiting(self) -> int:
        """End the children that wait; how many there were."""
        self._ending.set()
        try:
            ending, self._waiting = self._forked(), []
        finally:
            self._ending.clear()
        with futures.ThreadPoolExecutor() as at_once:
            return len(list(at_once.map(lambda pair: pair[1].end(), ending)))

    def server(self) -> Server:
        """The server that jobs are forked from; a new one where the former has died."""
        if self._server is None or not self._server.alive():
            self._server = Server(self._wrapper(), self._environment(), self.scratch)
        return self._server

    def fork_server(self, **environment: str) -> Server:
        """A separate server (worker.server) for jobs that run beside others (standing.py). The caller ends it.
        environment: variables that differ from those of other children."""
        return Server(self._wrapper(), {**self._environment(), **environment}, self.scratch)

    def run_under(
        self, prefix: list[str], job: str, arguments: dict, timeout_s: float, hidden: Iterable[Path | str] = ()
    ) -> Outcome:
        """Run a job in a process that the command `prefix`, a profiler, starts."""
        return self.run_when_asked(prefix, job, timeout_s, lambda _: (arguments, hidden))

    def run_when_asked(
        self,
        prefix: list[str],
        job: str,
        timeout_s: float,
        asked: Callable[[subprocess.Popen], tuple[dict, Iterable[Path | str]] | None],
        ahead: bool = False,
        **environment: str,
    ) -> Outcome:
        """`run_under` of the arguments and hidden files that `asked` returns, which may wait for them: the process has
        started by then. None ends it. ahead: it starts CUDA meanwhile. timeout_s: from when it is asked."""
        seal = secrets.token_hex(16)
        starter = 0 if self.isolation == "bwrap" else os.getpid()  # which numbers processes anew, and ends them with us
        with self.folder(job) as folder:
            # A name that no child knows: they may write in the folder.
            written, request, answer = (Path(folder, name) for name in (secrets.token_hex(8), "request.json", "report"))

            def ask(process: subprocess.Popen) -> None:
                if (wanted := asked(process)) is None:
                    kill_group(process)
                    return
                written.write_text(self.request(seal, folder, job, *wanted), encoding="utf-8")
                written.rename(request)

            command = [*self._wrapper(), *prefix, *WORKER, "once", str(request), str(answer), str(starter)]
            command += [json.dumps(self._ahead(job))] if ahead else []
            ended, log = run_to_end(command, {**self._environment(), **environment}, folder, timeout_s, ask)
            report = Report(seal)
            with contextlib.suppress(OSError), open(answer, "rb") as file:
                report.take(file.read(REPORT_BYTES + 1))
        self.spent.note(Path(prefix[0]).name, time.monotonic() - ended.wall_s)
        return self.usable(outcome(ended, report, log))

    def usable(self, outcome: Outcome) -> Outcome:
        """The outcome; EnvironmentLacks when the child's torch cannot use the GPU (worker.server)."""
        error = outcome.result.get("error") if self.gpu and isinstance(outcome.result, dict) else None
        if isinstance(error, dict) and error.get("status") == Status.NO_GPU:
            raise EnvironmentLacks(f"the GPU is {self.gpu.name}, driver {self.gpu.driver}; {error['message']}")
        return outcome

    def request(
        self, seal: str, folder: str, job: str, arguments: dict, hidden: Iterable[Path | str], off_gpu: bool = False
    ) -> str:
        """The text of a request. seal: that the answer must carry. folder: that the child works in. off_gpu: it leaves
        the GPU alone."""
        rules = {"writable": self._writable(), "hidden": [str(path) for path in hidden]}
        bounds = {**self._bounds(), "device": "cpu"} if off_gpu else self._bounds()
        request = {"seal": seal, "folder": folder, "job": job, **bounds, "rules": rules, "arguments": arguments}
        return json.dumps(request, allow_nan=False)

    def _ahead(self, job: str) -> dict:
        """How a process gets ready for a job whose request comes later (worker.server._get_ready)."""
        return {"job": job, **self._bounds(), "writable": self._writable()}

    def _bounds(self) -> dict:
        return {"device": "cuda" if self.gpu else "cpu", "confined": self.isolation == "landlock"}

    def _writable(self) -> list[str]:
        return [str(self.open), str(self.caches)]

    def _wrapper(self) -> list[str]:
        """bubblewrap's command: everything read-only but the scratch folder and the caches, no network, no other
        processes; nothing survives its parent."""
        if self.isolation != "bwrap":
            return []
        open_folders = [part for folder in self._writable() for part in ("--bind", folder, folder)]
        shared_memory = ["--bind", SHARED_MEMORY, SHARED_MEMORY] if Path(SHARED_MEMORY).is_dir() else []
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
        if folder := byte_code.kept():
            environment.setdefault("PYTHONPYCACHEPREFIX", str(folder))
        environment["TRITON_INTERPRET"] = "0" if self.gpu else "1"
        if self.gpu:  # a copy from it then lies in huge pages: page faults took most of its time
            environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, so that the GPU that is locked is used
        return environment


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


def outcome(ended: Exit, report: Report, log: str) -> Outcome:
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


def refuse_shared_memory(home: Path) -> None:
    """UsageError where the judge's files would lie in /dev/shm: kernels may write there."""
    if home.resolve().is_relative_to(SHARED_MEMORY):
        raise UsageError(
            f"{home} is in {SHARED_MEMORY}, where kernels may write: they could change what judges them. Set TMPDIR to "
            "another folder, or make the workspace elsewhere"
        )


def new_scratch(home: Path) -> tuple[Path, IO]:
    """A new folder in `home`, and a locked file in it, which shows other processes that this one lives. The file is
    locked before the folder gets the name that `remove_abandoned` of another process looks for."""
    unnamed = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
    alive = open(unnamed / "alive", "w")  # noqa: SIM115 (held as long as the sandbox lives)
    fcntl.flock(alive, fcntl.LOCK_EX)
    scratch = home / f"kernelopt-{unnamed.name.removeprefix('.new-')}"
    return unnamed.rename(scratch), alive


def remove_tree(folder: Path | str) -> None:
    """Remove a folder as far as that is possible. Its large files go several at a time: one after the other, the memory
    that held 45 GB of tensors was free after 10 s."""
    with contextlib.suppress(OSError, RuntimeError), futures.ThreadPoolExecutor(REMOVERS) as pool:  # or no more threads
        for _, _, names, place in os.fwalk(folder):  # by descriptors: no other folder can stand in for one
            large = [name for name in names if is_large(place, name)]
            list(pool.map(functools.partial(os.unlink, dir_fd=place), large))
    shutil.rmtree(folder, ignore_errors=True)


def is_large(place: int, name: str) -> bool:
    """Is it a large file? place: the descriptor of its folder."""
    found = os.stat(name, dir_fd=place, follow_symlinks=False)
    return stat.S_ISREG(found.st_mode) and found.st_size >= LARGE_BYTES


def remove_abandoned(home: Path) -> None:
    """Remove scratch folders of processes that were killed before they could do it."""
    for mark in home.glob("kernelopt-*/alive"):
        with contextlib.suppress(OSError), open(mark) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living owner holds it
            remove_tree(mark.parent)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
