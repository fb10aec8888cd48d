"""The fate of a process when its parent dies. This works on Linux only; elsewhere nothing happens."""

import contextlib
import ctypes
import os
import signal

LIBC = ctypes.CDLL(None)  # opened before any fork: a child of a process with threads may not do it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def die_with_parent(number: int, parent: int | None = None) -> None:
    """Get this signal when the thread that started this process ends, or now when `parent` has already ended."""
    _prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        signal.raise_signal(number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        LIBC.prctl(option, value)
