"""The one lock that guards a GPU, for all users of this machine."""

import contextlib
import fcntl
import getpass
import os
import sys
import time
from pathlib import Path
from typing import IO

from ..errors import EnvironmentLacks, say

WAIT_S = 600.0
LOCKS = Path("/tmp")  # not $TMPDIR: all users of the GPU must share the lock


@contextlib.contextmanager
def locked(uuid: str, timeout_s: float = WAIT_S):
    """Hold the one lock of a GPU, so that nothing else of this bundle measures on it.

    The kernel frees it when the holder dies. A wait is announced on stderr. EnvironmentLacks names the holder after
    `timeout_s`, at once where that is 0.
    """
    path = LOCKS / f"kernelopt-{uuid}.lock"
    with open(_lock_file(path), "r+") as file:
        deadline, announced = time.monotonic() + timeout_s, False
        while not _took(file):
            holder = file.read().strip() or "unknown"
            file.seek(0)
            if time.monotonic() >= deadline:
                raise EnvironmentLacks(f"GPU busy: {path} is held by {holder}; wait for it to end")
            if not announced:
                say(f"waiting for the GPU, which {holder} uses")
                announced = True
            time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {user()} ({' '.join(sys.argv)[:200]})\n")
        file.flush()
        yield


def _took(file: IO) -> bool:
    """Take the file's lock, if nobody holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _lock_file(path: Path) -> int:
    """The open lock, made if it is not there. Another user's is opened without O_CREAT: with that, Linux refuses it in
    a folder for everybody (fs.protected_regular), whatever its mode."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):
            path.chmod(0o666)  # for the other users of this GPU
        return handle


def user() -> str:
    """The name of the current user, or the user's number in a container that has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
