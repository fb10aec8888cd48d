"""Watches from inside the process that a candidate does nothing forbidden: audit hooks (PEP 578), replaced functions.

A program in the same process can bypass this with effort. The facts behind a verdict are therefore also checked outside
(see the package's docstring). This module names the common cheats, and protects the user's files where bubblewrap is
missing.
"""

import builtins
import contextlib
import functools
import gc
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from gc import get_referents
from operator import is_
from os.path import abspath, isdir, realpath
from pathlib import Path
from sys import _getframe
from threading import get_ident
from types import FrameType, FunctionType, MethodType

from .faults import CheatError, text_of

CHANGING = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.chmod"}
FORKING = {"os.fork", "os.forkpty", "os.kill", "os.killpg", "signal.pthread_kill"}
LOOKING = {"sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers", "gc.get_referents"}
LOOKING |= {"sys.setprofile", "sys.settrace", "sys.addaudithook", "sys.monitoring.register_callback"}
FRAME_ATTRIBUTES = {"tb_frame", "gi_frame", "cr_frame", "ag_frame"}
FRAME_READERS = ("/inspect.py", "/traceback.py")
# apache-tvm-ffi asks for a frame for each line of a C++ backtrace, in code that it makes with that line's file name.
ERRORS_OF_CPP = "/tvm_ffi/error.py"
SIGNALS = signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGUSR1
SYSTEM_FOLDERS = ("/dev/", "/proc/self/")  # always writable, and not files of a user
# Not in tempfile.gettempdir() itself: the kernels of an exploration, and of a comparison, share it.
MAY_WRITE = "write in a folder of tempfile.mkdtemp(), and let load_inline choose its own (TORCH_EXTENSIONS_DIR)"
ABSENT = object()
CALLBACK = "a callback of the garbage collector"
CALLBACKS = gc.callbacks  # the collector's own list, whatever the module names so later
WITH_CODE = (FunctionType, MethodType)  # of a watched module's or class's members
SPARSE = 8  # times as many members as are watched: then these are looked at alone
Space = tuple[str, Mapping, dict[str, object]]  # name of a module or class, its members, those of them that are watched

__builtins__ = dict(vars(builtins))  # the functions below use this copy; changes to the module do not reach it


class Tripwire:
    """Armed once in a child process that runs a candidate, from then to its end.

    candidate: the kernel's file. writable: folders it may write in. hidden: files it must not open. Only the harness
    opens them, inside `judging()`.
    """

    _judging = False  # of all tripwires of a process: a kernel and its baseline have one each

    def __init__(self, candidate: Path, writable: list[str], hidden: list[str]):
        self.candidate = str(candidate)
        self.writable = tuple(realpath(path) + "/" for path in writable) + SYSTEM_FOLDERS
        self.hidden = {realpath(path) for path in hidden}
        self.offences: list[str] = []
        # Both spellings: code names its file as sys.path spells it.
        spelt = [spell(path) for path in sys.path if path for spell in (realpath, abspath)]
        self._libraries = tuple(path + "/" for path in dict.fromkeys(spelt))
        self._harness = get_ident()
        sys.addaudithook(self._hook())

    @contextlib.contextmanager
    def judging(self):
        """Inside the block, the harness reads and writes its own files."""
        Tripwire._judging = True
        try:
            yield
        finally:
            Tripwire._judging = False

    def check(self) -> None:
        """Raises CheatError when the candidate did something forbidden, even if it caught the refusal."""
        if self.offences:
            raise CheatError(self.offences[0])

    def _hook(self):
        """The hook for sys.addaudithook. A flag that only this method sees marks a running hook, because the hook's own
        events are no offence."""
        state = threading.local()

        def hook(event: str, arguments: tuple) -> None:
            if event == "object.__getattr__" and arguments[1] not in FRAME_ATTRIBUTES:
                return  # the most frequent event by far
            if (self._judging and get_ident() == self._harness) or getattr(state, "looking", False):
                return
            state.looking = True
            try:
                offence = self._offence(event, arguments)
                teller = self._teller() if offence and event == "sys._getframe" else None
            finally:
                state.looking = False
            if (error := told_by(teller)) is not None:  # code of the candidate may run here, so it is watched again
                raise RuntimeError(text_of(error))
            if offence:
                self.offences.append(offence)
                raise CheatError(offence)

        return hook

    def _offence(self, event: str, arguments: tuple) -> str | None:
        if event == "open":
            return self._of_open(*arguments)
        if event in CHANGING:
            paths = {"os.rename": arguments[:2], "os.link": arguments[:2], "os.symlink": arguments[1:2]}
            return next(filter(None, map(self._of_path, paths.get(event, arguments[:1]))), None)
        if event in FORKING:
            return f"the kernel called {event}"
        if event == "socket.connect":
            return "the kernel opened a network connection"
        looks = event in LOOKING or (event == "object.__getattr__" and arguments[1] in FRAME_ATTRIBUTES)
        if looks and self._called_by_candidate():
            name = arguments[1] if event == "object.__getattr__" else event
            return (
                f"the kernel looks into its judge with {name}; leave out all that walks frames, also "
                "inspect.currentframe and inspect.stack"
            )
        return None

    def _of_open(self, path, mode: str | None, flags: int) -> str | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        name = realpath(os.fsdecode(path))
        if name in self.hidden:
            return f"the kernel opened {Path(name).name}, a file of the judge"
        process = name.removeprefix("/proc/").split("/")[0]
        if name.startswith("/proc/") and process.isdigit() and int(process) != os.getpid():
            return "the kernel looked into another process"
        if mode is None and isdir(name) and self._called_by_candidate():  # noqa: PTH112
            return self._of_path(path)  # the event does not report paths relative to an open folder in full
        changes = any(letter in mode for letter in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return self._of_path(path) if changes else None

    def _of_path(self, path) -> str | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        raw = abspath(os.fsdecode(path))  # noqa: PTH100 (links are handled separately)
        name = realpath(raw)
        own = f"/proc/{os.getpid()}/"
        if (name + "/").startswith((*self.writable, own)) or raw.startswith(SYSTEM_FOLDERS):
            return None
        return f"the kernel tried to change {name}, where no kernel may write; {MAY_WRITE}"

    def _called_by_candidate(self) -> bool:
        """Is the nearest code outside the frame reader no part of an installed library?"""
        frame = _getframe(2)
        reader = None
        while frame and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith(FRAME_READERS)):
            reader, frame = frame, frame.f_back
        if reader and reader.f_code.co_filename.endswith("/traceback.py") and "walk" not in reader.f_code.co_name:
            return False  # it prints or summarises, and returns no frame
        name = frame.f_code.co_filename if frame else "<frozen"
        return name == self.candidate or not name.startswith((*self._libraries, "<frozen"))

    def _teller(self) -> FrameType | None:
        """The frame of a library's ERRORS_OF_CPP that evaluates the code which asks for a frame, if one does."""
        frame = _getframe(2).f_back
        name = frame.f_code.co_filename if frame else ""
        return frame if name.endswith(ERRORS_OF_CPP) and name.startswith(self._libraries) else None


def told_by(teller: FrameType | None) -> BaseException | None:
    """The error that the code of this frame, or what called it in the same file, is giving a C++ backtrace."""
    frame = teller
    while frame and frame.f_code.co_filename == teller.f_code.co_filename:
        if isinstance(error := frame.f_locals.get("py_error"), BaseException):
            return error
        frame = frame.f_back
    return None


class Snapshot:
    """The functions that timing and judging use, as they were before the candidate was loaded.

    The objects are held and compared by identity, because each call of `id` raises an audit event, as each look at a
    function's code does. `check` follows each load and call of a candidate, so it first compares in one go what the
    watched modules, classes and functions hold, and looks at them one by one only where that differs.
    """

    def __init__(self):
        self._spaces = _watched()
        functions = {
            id(value): (owner, name, value)
            for owner, _, space in self._spaces
            for name, value in space.items()
            if isinstance(value, WITH_CODE)
        }
        self._functions = [(f"{owner}.{name}", f, f.__code__, f.__defaults__) for owner, name, f in functions.values()]
        self._sparse = [one for one in self._spaces if len(one[1]) > SPARSE * len(one[2])]
        dense = [space for _, space, watched in self._spaces if len(space) <= SPARSE * len(watched)]
        holders = [space if isinstance(space, dict) else get_referents(space)[0] for space in dense]
        holders += [getattr(function, "__func__", function) for _, function, _, _ in self._functions]
        self._holders = list({id(holder): holder for holder in holders}.values())
        self._held = get_referents(*self._holders)
        self._left_behind = _left_behind()

    def take_out_callbacks(self) -> None:
        """Take out what a load made the garbage collector call: JAX, which CuTe DSL imports, has it free memory. So
        nobody's sees what comes later."""
        CALLBACKS[:] = self._left_behind[CALLBACK]

    def check(self) -> None:
        """Raises CheatError when one of them was replaced since."""
        held = get_referents(*self._holders)
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            check_spaces(self._spaces)
            check_functions(self._functions)
            self._held = held  # what differs is not watched
        check_spaces(self._sparse)
        left = [name for name, found in _left_behind().items() if not same(found, self._left_behind[name])]
        if left:
            advice = "; import libraries at the top of the file" if left == [CALLBACK] else ""
            raise CheatError(f"the kernel left {' and '.join(left)} behind, which sees what comes later{advice}")


def check_spaces(spaces: Iterable[Space]) -> None:
    """CheatError when a watched member of a module or class is another object."""
    for owner, space, before in spaces:
        for name, value in before.items():
            if space.get(name, ABSENT) is not value:
                raise CheatError(f"{owner}.{name} was replaced while the kernel was loaded or run")


def check_functions(functions: Iterable[tuple]) -> None:
    """CheatError when a function has other code or defaults. functions: (name, function, its code, its defaults)."""
    for name, function, code, defaults in functions:
        if function.__code__ is not code or function.__defaults__ is not defaults:
            raise CheatError(f"{name} was replaced while the kernel was loaded or run")


def same(some: list, others: list) -> bool:
    """Are they the same objects? Their own opinion is not asked."""
    return len(some) == len(others) and all(map(is_, some, others))


def _left_behind() -> dict[str, list]:
    """What would run in later calls of other code, by kind; of torch's two kinds of modes, a mark for each."""
    import torch

    members = vars(torch.nn.modules.module)
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return {
        "a mode of torch": [None] * modes[0] + [True] * modes[1],
        "a hook of all modules": [hook for name in _names_of_hooks() for hook in members[name].values()],
        "a signal handler": [signal.getsignal(number) for number in SIGNALS],
        CALLBACK: list(CALLBACKS),
        "a profile function": [sys.getprofile()],
        "a trace function": [sys.gettrace()],
    }


@functools.cache
def _names_of_hooks() -> list[str]:
    """Names of torch's variables that hold the hooks of all modules, each a dictionary."""
    import torch

    members = vars(torch.nn.modules.module).items()
    return [name for name, value in members if name.startswith("_global_") and isinstance(value, dict)]


def _watched() -> list[Space]:
    """All members of the modules that only judge, and of torch those that make, wait, time or compute. The modules and
    classes themselves are watched where they are looked up.

    torch's own lazily patched Python functions (by dynamo, say) are left out.
    """
    import torch

    modules = {name: module for name, module in sys.modules.items() if name.startswith("kernelopt.")}
    looked_up = modules | {name: sys.modules[name] for name in ("torch", "triton.testing") if name in sys.modules}
    watched = [("sys", vars(sys), {"modules": sys.modules}), ("sys.modules", sys.modules, looked_up)]
    owners = {"time": time, "builtins": builtins, "json": json, "os": os, "gc": gc, "secrets": secrets}
    owners |= {"torch.cuda.Event": torch.cuda.Event, "torch.nn.functional": torch.nn.functional}
    if "triton.testing" in sys.modules:
        owners["triton.testing"] = sys.modules["triton.testing"]
    for owner, holder in owners.items():
        functions = {name: value for name, value in _members(holder).items() if callable(value)}
        watched.append((owner, vars(holder), functions))
    for owner, module in modules.items():
        watched.append((owner, vars(module), _members(module)))
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        watched += [(f"{owner}.{cls.__name__}", vars(cls), dict(vars(cls))) for cls in classes]
    for owner, holder, names in (
        ("torch", torch, "cuda nn Tensor save load allclose equal where empty zeros relu matmul softmax".split()),
        ("torch.nn", torch.nn, ["functional"]),
        ("torch.cuda", torch.cuda, ["Event", "synchronize", "current_stream", "_sleep", "stream", "CUDAGraph"]),
    ):
        watched.append((owner, vars(holder), {name: vars(holder)[name] for name in names}))
    inherited: set[str] = set()
    for cls in reversed(torch.Tensor.__mro__):  # a name that comes new before a base's would take its place
        inherited |= set(vars(cls)) - {"__dict__"}
        watched.append(("torch.Tensor", vars(cls), {name: vars(cls).get(name, ABSENT) for name in inherited}))
    return watched


def _members(holder) -> dict[str, object]:
    return {name: value for name, value in vars(holder).items() if not name.startswith("__")}
