"""What a command can fail with, and how it says so; each class carries its exit code (see docs/tools.md, "Exit
codes")."""

import contextlib
import sys


def say(message: str) -> None:
    """Progress and messages go to stderr; stdout belongs to the result."""
    if sys.stderr is None:  # closed; print would take stdout
        return
    with contextlib.suppress(OSError):  # nobody reads it any more; the work goes on
        print(message, file=sys.stderr, flush=True)


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
