"""The process that children are forked from, and how a child starts, reports and ends.

torch is imported once, here; a job then costs a fork and no start-up. No job runs in this process and no request is
read in it, so a child finds no trace of another's seeds or results, and a crash ends one child. CUDA is first used in
the children. A child may be forked ahead of its job: it starts CUDA and waits, and knows nothing of its request until
that comes.
"""

import contextlib
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy.random  # noqa: F401 (numpy loads it at its first use, which is in nearly every child)
import torch
import triton.testing  # noqa: F401  (so that the children start quickly; nothing that most jobs need imports torch._dynamo)

from ..device import landlock, processes
from . import interpreter, jobs
from .faults import NoGpuError, describe

with contextlib.suppress(ImportError):  # torch 2.6 lacks it
    import torch.utils.serialization  # (which each torch.save and torch.load needs)

FILE_BYTES = 64 << 30  # of one file that a candidate writes: outputs of large problems are large
HOST_MEMORY_SHARE = 0.6
MORE_TASKS = 4096  # threads and processes that a job may add to those of the machine
LOOK_EVERY_S = 0.01
LONGEST_LOOK_S = 60.0  # without news of a child
LONGEST_WAIT_S = 3600.0  # for a request: by then the inputs are made, or given up


def serve(handle: int) -> None:
    """Fork a child for each message on the socket. A message is {timeout_s, environment, ahead} with the files request,
    channel and log. A job that takes orders also gets a pipe for them. ahead: how a child gets ready (_get_ready) whose
    request comes later.

    Answers each with {exit_code (negative: the signal), timed_out, wall_s} when the child and all that it started have
    ended. A message {split} brings another socket: a fork of this process serves that one, so several jobs run at the
    same time and torch is imported once. When the other end of the socket is closed, the child is killed.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":  # whose interpreter imports it for the types of a kernel's arguments
        with contextlib.suppress(ImportError):  # Triton 3.2 has none
            import triton.experimental.gluon  # noqa: F401
    gc.freeze()  # a collection in a child would look at all that is imported here, and copy its memory
    processes.die_with_parent(signal.SIGKILL)
    processes.adopt_orphans()
    # Sandboxes of agents refuse getsockopt, which finds family and kind out, and sendto, which `send` is.
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=handle)
    apart: set[int] = set()
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 16, 4)
        if not message:
            return
        wanted = json.loads(message)
        start = time.monotonic()
        child = _fork(wanted, files, control)
        if "split" in wanted:
            apart.add(child)
            continue
        status, timed_out = _wait(child, wanted["timeout_s"], control)
        _end_all_children(apart)
        code = os.waitstatus_to_exitcode(status)
        answer = {"exit_code": code, "timed_out": timed_out, "wall_s": time.monotonic() - start}
        with contextlib.suppress(BrokenPipeError):
            control.sendmsg([json.dumps(answer).encode() + b"\n"])


def _fork(wanted: dict, files: list[int], control: socket.socket) -> int:
    """The number of a child that does what a message wants, with its files."""
    child = os.fork()
    if child == 0:
        control.close()
        if "split" in wanted:
            _serve_apart(*files)
        os.environ.update(wanted.get("environment", {}))
        _become_job(wanted.get("ahead"), *files)
    for file in files:
        os.close(file)
    return child


def _serve_apart(handle: int) -> None:
    """Serve another socket in this fork, to its end."""
    os.setsid()
    try:
        serve(handle)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def once(request: Path, result: Path, starter: int, ahead: dict | None = None) -> None:
    """Run one job in this process, for a profiler that must start it and see it end normally. Its request may come
    later, from the process `starter`. ahead: for `_get_ready`, before that; what fails there fails in the job again,
    which reports it."""
    _limit()
    with open(result, "wb", buffering=0) as channel:
        is_ready = False
        if ahead:
            try:
                _get_ready(None, **ahead)
                is_ready = True
            except Exception:
                traceback.print_exc()
        text = _awaited(request, starter)
        _perform(json.loads(text), channel.fileno(), is_confined=is_ready)


def _awaited(request: Path, starter: int) -> str:
    """The text of a request, once it is there. RuntimeError where the process that was to write it has ended, or takes
    too long. starter: its number, or 0 where it cannot be seen."""
    ends = time.monotonic() + LONGEST_WAIT_S
    while not request.exists():
        if starter and not processes.runs(starter):
            raise RuntimeError("the request will not come: its writer has ended")
        if time.monotonic() > ends:
            raise RuntimeError(f"no request came in {LONGEST_WAIT_S:.0f} s")
        time.sleep(LOOK_EVERY_S)
    text = request.read_text(encoding="utf-8")
    request.unlink()  # it holds the seal of the report
    return text


def _become_job(ahead: dict | None, request: int, channel: int, log: int, orders: int | None = None) -> None:
    """Run the job that `request` describes and end this process. ahead: for `_get_ready`, before the request comes."""
    failed = 1
    try:
        os.setsid()
        processes.die_with_parent(signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _limit()
        if ahead:
            _get_ready(request, **ahead)
        with os.fdopen(request) as file:
            wanted = json.loads(file.read())
        os.chdir(wanted["folder"])
        if os.environ.get("PYTHONFAULTHANDLER"):  # Python itself looks at its start, before the fork
            faulthandler.enable(open(processes.STACK_FILE, "w"), all_threads=False)  # noqa: SIM115 (open to the end)
        failed = _perform(wanted, channel, orders, is_confined=bool(ahead))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(failed)  # after a CUDA error destructors may hang


def _get_ready(line: int | None, job: str, device: str, confined: bool, writable: list[str]) -> None:
    """Do what a job needs before its request comes, and say so on `line`, if there is one. Landlock binds only threads
    that are made later, so it precedes CUDA. Whatever fails ends a forked child; the job then runs in a fresh one,
    which reports why."""
    if confined:
        landlock.confine(writable)
    if job in jobs.IMPORTS:
        jobs.IMPORTS[job]()
    if device == "cuda":
        _require_gpu()
    if job in jobs.WARM_UPS:
        jobs.WARM_UPS[job](device)
    if line is not None:
        os.write(line, b".")


def _limit() -> None:
    """Forbid core files, endless files, more memory than the machine has, and fork bombs (root escapes the last
    limit)."""
    memory = int(HOST_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    tasks = _tasks() + MORE_TASKS
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_NPROC, tasks),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _tasks() -> int:
    """Threads of all processes of the machine: those of this user are among them, also where a container hides some."""
    with contextlib.suppress(OSError, IndexError, ValueError):  # not Linux
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    return 0


def _perform(request: dict, channel: int, orders: int | None = None, is_confined: bool = False) -> int:
    """Run a job and report its result; 0, or 1 when it raised. The result of a job that only answers orders is
    empty."""
    if request["confined"] and not is_confined:
        landlock.confine(request["rules"]["writable"])
    if request["device"] == "cpu":
        interpreter.install()
    line = Channel(channel, request["seal"])
    failed = False
    try:
        if request["device"] == "cuda":
            _require_gpu()
        context = jobs.Context(request["device"], request["rules"], line, orders)
        result = jobs.JOBS[request["job"]](context, **request["arguments"])
    except BaseException as error:
        traceback.print_exc()
        result, failed = {"error": describe(error)}, True
    line.send({"result": {} if result is None else result})
    return int(failed)


def _require_gpu() -> None:
    """NoGpuError when torch cannot run anything on the GPU: built without CUDA, for other GPUs, or for a newer
    driver. It runs before any file of the user is loaded, because this is not the fault of those files."""
    try:
        torch.zeros(1, device="cuda").item()
    except torch.cuda.OutOfMemoryError:
        return
    except Exception as error:
        why = (str(error).strip() or repr(error)).splitlines()[0]
        raise NoGpuError(f"torch {torch.__version__} cannot use it: {why}. {_mend_of(why)}") from None


def _mend_of(why: str) -> str:
    """What to do about a torch that cannot use the GPU."""
    if torch.version.hip is not None:
        return f"It is built for AMD's GPUs, with ROCm {torch.version.hip}: install one that is built with CUDA"
    if torch.version.cuda is None:
        return "Install a torch that is built with CUDA"
    if "out of memory" in why:  # for the context itself
        return "Other processes hold its memory: nvidia-smi lists them; end some, or wait for them"
    return (
        f"It is built with CUDA {torch.version.cuda}: install one for this GPU and driver, or a newer driver; "
        "nvidia-smi shows whether the GPU itself is well"
    )


def json_of(answer: object) -> dict[str, object]:
    """The JSON object of a dataclass: by its own to_json, or else its fields by name. TypeError for anything else. It
    calls no function of `dataclasses`: tripwire.Snapshot does not watch them."""
    if hasattr(answer, "to_json"):
        return answer.to_json()
    if not hasattr(answer, "__dataclass_fields__"):
        raise TypeError(f"{type(answer).__name__} has no JSON form")
    return dict(vars(answer))


class Channel:
    """The channel to the parent: one line of JSON per message, each behind the seal that only this job knows."""

    def __init__(self, handle: int, seal: str):
        self._handle, self._seal, self._process = handle, seal, os.getpid()

    def send(self, message: dict[str, object]) -> None:
        """Send a message; dataclasses anywhere in it become JSON objects (see json_of)."""
        if os.getpid() != self._process:
            os._exit(1)  # a fork of the candidate's
        text = json.dumps(message, allow_nan=False, default=json_of)
        data = memoryview(f"{self._seal} {text}\n".encode())
        while data:
            data = data[os.write(self._handle, data) :]


def _wait(child: int, timeout_s: float, control: socket.socket) -> tuple[int, bool]:
    """(wait status, whether it was killed for taking too long) of a child. It is killed as well when the parent
    hangs up."""
    deadline = time.monotonic() + timeout_s
    with _news_of(child, control) as next_news:
        while True:
            hung_up = next_news(deadline - time.monotonic())
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status, False
            if hung_up or time.monotonic() > deadline:
                _kill_group(child)
                return os.waitpid(child, 0)[1], True


@contextlib.contextmanager
def _news_of(child: int, control: socket.socket) -> Iterator[Callable[[float], bool]]:
    """A function that waits until the child ends or the other end of the socket is closed, some seconds at most, and
    says whether that end is closed. Where Linux is too old for that, or a sandbox refuses it, it returns early."""
    news, longest_s, handle = select.poll(), LOOK_EVERY_S, None
    news.register(control, select.POLLRDHUP)
    with contextlib.suppress(OSError):
        handle, longest_s = os.pidfd_open(child), LONGEST_LOOK_S
        news.register(handle, select.POLLIN)
    try:
        yield lambda left_s: any(
            file == control.fileno() for file, _ in news.poll(1000 * min(max(left_s, 0), longest_s))
        )
    finally:
        if handle is not None:
            os.close(handle)


def _kill_group(child: int) -> None:
    for kill in (os.killpg, os.kill):  # the group does not exist before the child has made it
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _end_all_children(apart: set[int]) -> None:
    """Kill and reap whatever a job left running, in its session or out of it. apart: the forks of this process that
    serve others, which go on; those that have ended are taken out."""
    apart -= {fork for fork in apart if os.waitpid(fork, os.WNOHANG)[0]}
    while processes.has_children():
        left = [child for child, parent in processes.parents().items() if parent == os.getpid() and child not in apart]
        if not left:
            return
        for child in left:
            _kill_group(child)
            os.waitpid(child, processes.WALL)
