"""What keeps a child from the user's files and the network: bubblewrap, Landlock, or nothing."""

import shutil
import subprocess

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


def why_no_bubblewrap() -> str | None:
    if shutil.which("bwrap") is None:
        return "no bwrap on the PATH"
    done = subprocess.run([*BWRAP, "--unshare-net", "--unshare-pid", "--", "true"], capture_output=True, text=True)
    return done.stderr.strip() or f"exit {done.returncode}" if done.returncode else None
