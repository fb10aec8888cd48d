"""Errors in a child process, as statuses."""

import contextlib
import re

from ..statuses import Status
from . import problem


class LoadError(Exception):
    """The kernel's file cannot be loaded or bound."""


class OracleError(Exception):
    """The reference cannot be loaded or run."""


class BaselineError(Exception):
    """The baseline of a comparison cannot be loaded or run."""


class NoGpuError(Exception):
    """torch cannot use the GPU."""


class HangError(Exception):
    """The kernel's work on the GPU does not end."""


class CheatError(Exception):
    """The kernel tampers with its judge."""


STATUS_OF_OWN = {
    problem.UnknownWorkload: Status.USAGE,
    problem.CastOfQuantised: Status.USAGE,
    problem.UnsupportedInput: Status.INVALID_TASK,
    NoGpuError: Status.NO_GPU,  # a fault of the machine: sandbox.Sandbox turns it into exit code 3
    LoadError: Status.IMPORT_ERROR,
    OracleError: Status.INVALID_REFERENCE,
    BaselineError: Status.BASELINE_ERROR,
    CheatError: Status.CHEAT_SUSPECT,
    HangError: Status.TIMEOUT,
}
STATUS_OF_SIGN = {  # the first sign found in the message decides
    "Error building extension": Status.COMPILE_ERROR,
    "illegal memory access": Status.ILLEGAL_ACCESS,
    "misaligned address": Status.ILLEGAL_ACCESS,
    "can't allocate memory": Status.OOM,
    "Cannot allocate memory": Status.OOM,
    "No space left": Status.NO_SPACE,
    "PytorchStreamWriter failed": Status.NO_SPACE,
    "inline_container": Status.NO_SPACE,
    "invalid configuration argument": Status.LAUNCH_ERROR,
    "too many resources": Status.LAUNCH_ERROR,
}
STATUS_OF_TYPE = {
    "CompilationError": Status.COMPILE_ERROR,
    "CompileTimeAssertionFailure": Status.COMPILE_ERROR,
    "OutOfResources": Status.LAUNCH_ERROR,
    "OutOfMemoryError": Status.OOM,
    "MemoryError": Status.OOM,
}
MESSAGE_CHARACTERS = 2000
ERROR_LINE = re.compile(r"\b(fatal )?error\b.*: |: (fatal )?error:")


def describe(error: BaseException) -> dict:
    """{status, type, message} of an exception; the status is one of verify's."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    own = next((status for kind, status in STATUS_OF_OWN.items() if isinstance(error, kind)), None)
    by_type = [STATUS_OF_TYPE[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in STATUS_OF_TYPE]
    by_sign = [status for sign, status in STATUS_OF_SIGN.items() if sign in text]
    status = own or next(iter(by_type + by_sign), Status.RUNTIME_ERROR)
    message = str(error) if own or isinstance(error, problem.ContractError) else text
    if status == Status.COMPILE_ERROR:
        message = from_first_error(message)
    if len(message) > MESSAGE_CHARACTERS:
        half = MESSAGE_CHARACTERS // 2
        message = f"{message[:half]} … {message[-half:]}"
    message = message.encode("utf-8", "backslashreplace").decode()  # half a character can be neither printed nor stored
    return {"status": status, "type": type(error).__name__, "message": message}


def from_first_error(message: str) -> str:
    """A compiler's output from its first error on: commands and warnings before it would push it out of the message."""
    lines = message.splitlines()
    first = next((number for number, line in enumerate(lines) if ERROR_LINE.search(line)), 0)
    return "\n".join(lines[first:])


@contextlib.contextmanager
def blaming(kind: type[Exception]):
    """Blame errors inside the block on the file. Compile errors and exhausted memory keep their own kind."""
    try:
        yield
    except Exception as error:
        if describe(error)["status"] != Status.RUNTIME_ERROR:
            raise
        raise kind(describe(error)["message"]) from error
