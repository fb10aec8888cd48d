"""Child processes: the only place that starts GPU work. The parent never imports a candidate."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from . import bundle, gpu

LOG_TAIL_BYTES = 8000
# Names of environment variables that a candidate has no business with.
SECRETS = re.compile(
    r"(?i)token|secret|passw|credential|api_?key|private|^(aws|azure|google|gcp|ssh|github|gitlab|hf)_"
)
WORKER_PACKAGES = ("torch", "triton", "numpy")


@dataclass(frozen=True)
class Outcome:
    """How a child ended. `result` is what the worker wrote, None when it died before."""

    result: dict | None
    exit_code: int | None
    signal: str | None
    timed_out: bool
    wall_s: float
    log_tail: str


class Sandbox:
    """A scratch folder with caches of its own, and the device that children run on.

    device: "cuda" (identified through NVML, locked while a child runs) or "cpu-interpreter".
    cache: kept between runs (a workspace's .cache); None keeps nothing.
    """

    def __init__(self, device: str, cache: Path | None = None):
        bundle.require(*WORKER_PACKAGES)  # or their absence would be blamed on the kernel
        self.device = device
        self.gpu = gpu.identify() if device == "cuda" else None
        home = cache or Path(tempfile.gettempdir())
        home.mkdir(exist_ok=True)
        remove_abandoned(home)
        self.scratch = Path(tempfile.mkdtemp(prefix="kernelopt-", dir=home))
        self._alive = open(self.scratch / "alive", "w")  # noqa: SIM115 (held as long as the sandbox lives)
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        self.caches = cache or self.scratch

    def new_folder(self, name: str) -> str:
        """A fresh folder in the scratch folder."""
        return tempfile.mkdtemp(prefix=f"{name}-", dir=self.scratch)

    @property
    def device_name(self) -> str:
        return self.gpu["name"] if self.gpu else self.device

    def __enter__(self) -> "Sandbox":
        self._lock = gpu.locked(self.gpu["uuid"]) if self.gpu else contextlib.nullcontext()
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
        self._alive.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def run(self, job: str, arguments: dict, timeout_s: float, prefix: list[str] = ()) -> Outcome:
        """Run a job of `worker` in a child process. `prefix` goes before its command (a profiler)."""
        folder = Path(self.new_folder(job))
        request = {"job": job, "device": "cuda" if self.gpu else "cpu", "arguments": arguments}
        bundle.write_json(folder / "request.json", request)
        command = [*prefix, sys.executable, "-m", "kernelopt.worker", str(folder / "request.json")]
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log = Tail(process.stdout)
        try:
            code, timed_out = process.wait(timeout_s), False
        except subprocess.TimeoutExpired:
            code, timed_out = None, True
        finally:
            kill_group(process)
        outcome = Outcome(
            result=read_result(folder / "result.json"),
            exit_code=code if code is not None and code >= 0 else None,
            signal=signal_name(-code) if code is not None and code < 0 else None,
            timed_out=timed_out,
            wall_s=round(time.monotonic() - start, 3),
            log_tail=log.text(),
        )
        shutil.rmtree(folder, ignore_errors=True)  # a request holds seeds and paths that the next child must not see
        return outcome

    def _environment(self) -> dict[str, str]:
        """The caller's environment without its secrets, with every compiler cache moved into this sandbox."""
        caches = {
            name: str(self.caches / folder)
            for name, folder in {
                "TRITON_CACHE_DIR": "triton",
                "TORCHINDUCTOR_CACHE_DIR": "inductor",
                "TORCH_EXTENSIONS_DIR": "extensions",
                "CUDA_CACHE_PATH": "cuda",
            }.items()
        }
        paths = [str(bundle.ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
        kept = {name: value for name, value in os.environ.items() if not SECRETS.search(name)}
        environment = {**kept, **caches, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONSAFEPATH", None)
        environment["TRITON_INTERPRET"] = "0" if self.gpu else "1"
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, so that the GPU that is locked is used
        return environment


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
    """End the child and whatever it left running in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_result(path: Path) -> dict | None:
    """What the child wrote, if it is an object at all."""
    with contextlib.suppress(OSError, ValueError):
        result = bundle.loads(path.read_text(encoding="utf-8"))
        return result if isinstance(result, dict) else None
    return None


class Tail:
    """The last of what a child prints, read as it comes, so that a kernel that prints without end fills nothing."""

    GRACE_S = 2.0  # a process that left the child's session may hold the pipe open

    def __init__(self, stream):
        self._stream, self._kept = stream, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while piece := self._stream.read1(1 << 16):
            self._kept = (self._kept + piece)[-LOG_TAIL_BYTES:]
        self._stream.close()

    def text(self) -> str:
        self._thread.join(self.GRACE_S)
        return self._kept.decode("utf-8", "replace")
