"""What a candidate must leave alone, watched from inside its process: audit hooks (PEP 578) and replaced functions.

A program in the same process can get around this, at a price; what decides a verdict is therefore checked
outside as well (see the package's docstring). It names the common cheats, and keeps a file of the user's from harm
where no bubblewrap does.
"""

import builtins
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

from .faults import CheatError

CHANGING = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.chmod"}
FORKING = {"os.fork", "os.forkpty", "os.kill", "os.killpg", "signal.pthread_kill"}
LOOKING = {"sys._getframe", "gc.get_objects", "gc.get_referrers"}
FRAME_READERS = ("inspect.py", "traceback.py")
SYSTEM_FOLDERS = ("/dev/", "/proc/self/")  # writable anyway, and nobody's files


class Tripwire:
    """Armed once in a child process that runs a candidate.

    candidate: the kernel's file. writable: folders it may write in. hidden: files it must not open. Inside the `with`
    block the candidate runs; what the harness does outside of it, in its own thread, is not looked at.
    """

    def __init__(self, candidate: Path, writable: list[str], hidden: list[str]):
        self.candidate = str(candidate)
        self.writable = tuple(os.path.realpath(path) + "/" for path in writable) + SYSTEM_FOLDERS
        self.hidden = {os.path.realpath(path) for path in hidden}
        self.found: list[str] = []
        self._harness = threading.get_ident()
        self._armed = False
        self._own = threading.local()  # what the hook itself does is no offence
        sys.addaudithook(self._hook)

    def __enter__(self) -> None:
        self._armed = True

    def __exit__(self, *_) -> None:
        self._armed = False

    def check(self) -> None:
        """CheatError when the candidate touched what it must not, even if it caught the refusal."""
        if self.found:
            raise CheatError(self.found[0])

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self._armed and threading.get_ident() == self._harness:
            return
        if getattr(self._own, "looking", False):
            return
        self._own.looking = True
        try:
            what = self._offence(event, arguments)
        finally:
            self._own.looking = False
        if what:
            self.found.append(what)
            raise CheatError(what)

    def _offence(self, event: str, arguments: tuple) -> str | None:
        if event == "open":
            return self._of_open(*arguments)
        if event in CHANGING:
            return self._of_path(arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0])
        if event in FORKING:
            return f"the kernel called {event}"
        if event == "socket.connect":
            return "the kernel opened a network connection"
        if event in LOOKING and self._called_by_candidate():
            return f"the kernel looks into its judge with {event}"
        return None

    def _of_open(self, path, mode: str | None, flags: int) -> str | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        name = os.path.realpath(os.fsdecode(path))
        if name in self.hidden:
            return f"the kernel opened {Path(name).name}, a file of the judge"
        process = name.removeprefix("/proc/").split("/")[0]
        if name.startswith("/proc/") and process.isdigit() and int(process) != os.getpid():
            return "the kernel looked into another process"
        changes = any(letter in mode for letter in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return self._of_path(path) if changes else None

    def _of_path(self, path) -> str | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        raw = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (links are looked at apart)
        name = os.path.realpath(raw)
        own = f"/proc/{os.getpid()}/"
        if (name + "/").startswith((*self.writable, own)) or raw.startswith(SYSTEM_FOLDERS):
            return None
        return f"the kernel tried to change {name}, outside its own folder"

    def _called_by_candidate(self) -> bool:
        frame = sys._getframe(3)  # hook and helpers lie between
        if frame is not None and frame.f_code.co_filename.endswith(FRAME_READERS):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename == self.candidate


class Snapshot:
    """The functions that timing and judging rest on, as they were before the candidate was loaded."""

    def __init__(self):
        self._before = {key: _identity(value) for key, value in _watched().items()}
        self._modes = _modes()

    def check(self) -> None:
        """CheatError when one of them was replaced since."""
        now = _watched()
        for key, before in self._before.items():
            if key not in now or _identity(now[key]) != before:
                raise CheatError(f"{key} was replaced while the kernel was loaded or run")
        if _modes() != self._modes:
            raise CheatError("the kernel left a mode of torch behind, which sees every later operation")


def _modes() -> tuple[int, int]:
    """How many torch function and dispatch modes are entered."""
    import torch

    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def _identity(function) -> tuple:
    return id(function), id(getattr(function, "__code__", None))


def _watched() -> dict[str, object]:
    """Functions by name: all of the modules that only judge, and of torch those that make, wait, time or compute.

    torch's own lazily patched Python functions (by dynamo, say) are left out.
    """
    import torch

    owners = {"time": time, "builtins": builtins, "json": json, "os": os, "gc": gc}
    owners |= {"torch.cuda.Event": torch.cuda.Event, "torch.nn.functional": torch.nn.functional}
    if "triton.testing" in sys.modules:
        owners["triton.testing"] = sys.modules["triton.testing"]
    found = {
        f"{owner}.{name}": value
        for owner, space in owners.items()
        for name, value in vars(space).items()
        if callable(value) and not name.startswith("__")
    }
    for owner, module in sys.modules.items():
        if owner.startswith("kernelopt."):
            found |= {f"{owner}.{name}": value for name, value in vars(module).items() if not name.startswith("__")}
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            found |= {f"{owner}.{cls.__name__}.{name}": member for cls in classes for name, member in vars(cls).items()}
    for name in ("save", "load", "allclose", "equal", "empty", "zeros", "relu", "matmul", "softmax"):
        found[f"torch.{name}"] = getattr(torch, name)
    for cls in reversed(torch.Tensor.__mro__):
        found |= {f"torch.Tensor.{name}": member for name, member in vars(cls).items() if name != "__dict__"}
    for name in ("synchronize", "current_stream", "_sleep", "stream", "CUDAGraph"):
        found[f"torch.cuda.{name}"] = getattr(torch.cuda, name)
    return found
