"""What keeps a child from the user's files and the network: bubblewrap, Landlock, or nothing."""

import shutil
import subprocess
from pathlib import Path

from ..errors import EnvironmentLacks, UsageError
from . import landlock

KINDS = ("auto", "bwrap", "landlock", "none")
BWRAP = ["bwrap", "--ro-bind", "/", "/"]


def isolation(kind: str) -> str:
    """ "bwrap", "landlock" or "none" for a value of --sandbox. EnvironmentLacks when the demanded one does not work."""
    if kind not in KINDS:
        raise UsageError(f"--sandbox is one of {', '.join(KINDS)}")
    if kind == "none":
        return "none"
    if kind != "landlock":
        if not (lacking := why_no_bubblewrap()):
            return "bwrap"
        if kind == "bwrap":
            raise EnvironmentLacks(f"bubblewrap does not work here ({lacking}); install it, or pass --sandbox auto")
    if landlock.version():
        return "landlock"
    if kind == "landlock":
        raise EnvironmentLacks(
            "this kernel has no Landlock (Linux 5.13 has it, unless switched off); pass --sandbox auto"
        )
    return "none"


def wrapper(kind: str, writable: list[str]) -> list[str]:
    """The start of a command that is to run in isolation of this kind; empty where it needs none. bubblewrap's:
    everything read-only but the folders `writable`, no network, no other processes; nothing survives its parent."""
    if kind != "bwrap":
        return []
    open_folders = [part for folder in writable for part in ("--bind", folder, folder)]
    shared = landlock.SHARED_MEMORY
    shared_memory = ["--bind", shared, shared] if Path(shared).is_dir() else []
    base = [*BWRAP, "--dev-bind", "/dev", "/dev", *shared_memory, "--proc", "/proc"]
    return [*base, *open_folders, "--unshare-net", "--unshare-pid", "--die-with-parent", "--"]


def why_no_bubblewrap() -> str | None:
    if shutil.which("bwrap") is None:
        return "no bwrap on the PATH"
    done = subprocess.run([*BWRAP, "--unshare-net", "--unshare-pid", "--", "true"], capture_output=True, text=True)
    return done.stderr.strip() or f"exit {done.returncode}" if done.returncode else None
