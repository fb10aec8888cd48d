"""What a command can fail with, and how it says so; each class carries its exit code (see docs/tools.md, "Exit
codes")."""

import contextlib
import errno
import os
import sys

REFUSED_CALL = "a sandbox around this command refused a system call; docs/install.md says what to allow"
IN_A_SANDBOX = "in an agent's sandbox, docs/install.md says what to allow"


def say(message: str) -> None:
    """Progress and messages go to stderr; stdout belongs to the result."""
    if sys.stderr is None:  # closed; print would take stdout
        return
    with contextlib.suppress(OSError):  # nobody reads it any more; the work goes on
        print(message, file=sys.stderr, flush=True)


def of_the_system(error: OSError) -> str:
    """One sentence on an error of the system that no tool expected. EPERM without a file comes from a filter of system
    calls."""
    if error.errno == errno.EPERM and not error.filename:
        return f"{os.strerror(errno.EPERM)}: {REFUSED_CALL}"
    sentence = f"{error.strerror or error}: {error.filename or 'input or output'}; check disk space and permissions"
    return sentence if error.filename and error.errno != errno.EROFS else f"{sentence}; {IN_A_SANDBOX}"


class ToolError(Exception):
    """One sentence: what happened and what to do about it."""

    exit_code = 1


class Refused(ToolError):
    """Done, and the answer is no."""

    exit_code = 1


class UsageError(ToolError):
    """The call, a file or a name is wrong."""

    exit_code = 2


class EnvironmentLacks(ToolError):
    """Something that the machine must offer is missing, with the way to get it."""

    exit_code = 3


class TimedOut(ToolError):
    """A child process outlived its limit."""

    exit_code = 4


class Stopped(TimedOut):
    """The command is ended from outside (device/stop_signal.py)."""
