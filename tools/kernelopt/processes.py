"""What becomes of a process when its parent dies. Linux only; elsewhere nothing happens."""

import contextlib
import ctypes

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def die_with_parent(number: int) -> None:
    """Get this signal when the thread that started this process ends."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """What leaves a child's session becomes a child of this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)
