"""Child processes: the only place that starts GPU work. The parent never imports a candidate."""

import contextlib
import functools
import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .. import bundle
from ..errors import EnvironmentLacks
from ..statuses import Status
from . import gpu, gpu_lock
from .child_environment import child_environment
from .child_process import kill_group, run_to_end
from .fork_server import WORKER, Server
from .forked_ahead import ForkedAhead
from .isolation import isolation, wrapper
from .outcomes import Outcome, outcome
from .pipes import REPORT_BYTES, Report
from .requests import Requests
from .scratch import new_scratch, refuse_shared_memory, remove_abandoned, remove_tree
from .spent import Spent
from .stop_signal import Stop

WORKER_PACKAGES = ("torch", "triton", "numpy")


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
        self.forked_ahead = ForkedAhead(self.gpu is not None, self.server, lambda job: self.requests.ahead(job))
        self.beside: list = []  # each a Beside (beside.py) that has not been ended
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
        self.forked_ahead.end()
        self._lock.__exit__(*exc)
        self.remove()

    def remove(self) -> None:
        self.forked_ahead.close()
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
            ready = self.forked_ahead.take(job)
            seal = ready.seal if ready else secrets.token_hex(16)
            request = self.requests.text(seal, folder, job, arguments, hidden)
            if ready:
                self.note_reports(job, ready.report)
                ended = ready.run(request, timeout_s)
            else:
                ended = self.server().fork(request, seal, timeout_s, functools.partial(self.note_reports, job))
        return self.usable(outcome(*ended))

    def note_reports(self, job: str, *reports: Report) -> None:
        """The latest processes of a job, which run at the same time, report here."""
        self.reports[job] = list(reports)

    def server(self) -> Server:
        """The server that jobs are forked from; a new one where the former has died."""
        if self._server is None or not self._server.alive():
            self._server = self.fork_server()
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
                written.write_text(self.requests.text(seal, folder, job, *wanted), encoding="utf-8")
                written.rename(request)

            command = [*self._wrapper(), *prefix, *WORKER, "once", str(request), str(answer), str(starter)]
            command += [json.dumps(self.requests.ahead(job))] if ahead else []
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

    @property
    def requests(self) -> Requests:
        return Requests("cuda" if self.gpu else "cpu", self.isolation == "landlock", self._writable())

    def _writable(self) -> list[str]:
        return [str(self.open), str(self.caches)]

    def _wrapper(self) -> list[str]:
        return wrapper(self.isolation, self._writable())

    def _environment(self) -> dict[str, str]:
        return child_environment(self.open, self.caches, on_gpu=self.gpu is not None)
