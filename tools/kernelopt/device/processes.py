"""Parents and children among processes, and the fate of a process when its parent dies. This works on Linux only;
elsewhere nothing happens."""

import contextlib
import ctypes
import os
import signal

LIBC = ctypes.CDLL(None)  # opened before any fork: a child of a process with threads may not do it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
STACK_FILE = "stack.txt"  # in a job's folder: where its Python code was when a signal ended it
WALL = 0x40000000  # linux/wait.h: children of every kind


def die_with_parent(number: int, parent: int | None = None) -> None:
    """Get this signal when the thread that started this process ends, or now when `parent` has already ended."""
    _prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        signal.raise_signal(number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """Has this process a child, running or ended, that nobody has waited for?"""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | WALL)
    except ChildProcessError:
        return False
    return True


def runs(process: int) -> bool:
    """Does a process of this number run? One that has ended and that nobody has waited for does not."""
    try:
        return stat(process)[0] not in (b"Z", b"X")
    except OSError:
        return False


def parents() -> dict[int, int]:
    """The parent of each process of this machine."""
    of_process = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (quicker than a Path each)
        if name.isdigit():
            with contextlib.suppress(OSError):  # it may have ended
                of_process[int(name)] = int(stat(name)[1])
    return of_process


def stat(process: int | str) -> list[bytes]:
    """The fields behind a process's name: its state, its parent, … (proc(5)). OSError where there is none."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        LIBC.prctl(option, value)
