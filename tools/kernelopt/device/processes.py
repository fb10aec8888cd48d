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
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def parents() -> dict[int, int]:
    """The parent of each process of this machine."""
    of_process = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (quicker than a Path each)
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may have ended
                of_process[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return of_process


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        LIBC.prctl(option, value)
