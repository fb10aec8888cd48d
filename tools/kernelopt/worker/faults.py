"""What went wrong in a child process, in verify's statuses."""

import contextlib

from . import problem


class LoadError(Exception):
    """The kernel's file cannot be loaded or bound."""


class OracleError(Exception):
    """The reference cannot be loaded or run."""


class OpponentError(Exception):
    """What a kernel is compared with cannot be loaded or run."""


class NoGpuError(Exception):
    """torch cannot use the GPU."""


class CheatError(Exception):
    """The kernel tampers with what judges it."""


NO_GPU = "NO_GPU"  # the machine's fault: sandbox.Sandbox makes exit 3 of it
STATUS_OF_OWN = {
    problem.UnknownWorkload: "USAGE",
    problem.CastOfQuantised: "USAGE",
    problem.UnsupportedInput: "INVALID_TASK",
    NoGpuError: NO_GPU,
    LoadError: "IMPORT_ERROR",
    OracleError: "INVALID_REFERENCE",
    OpponentError: "OPPONENT",
    CheatError: "CHEAT_SUSPECT",
}
STATUS_OF_SIGN = {  # the first sign found in the message decides
    "Error building extension": "COMPILE_ERROR",
    "illegal memory access": "ILLEGAL_ACCESS",
    "misaligned address": "ILLEGAL_ACCESS",
    "can't allocate memory": "OOM",
    "Cannot allocate memory": "OOM",
    "No space left": "NO_SPACE",
    "PytorchStreamWriter failed": "NO_SPACE",
    "inline_container": "NO_SPACE",
    "invalid configuration argument": "LAUNCH_ERROR",
    "too many resources": "LAUNCH_ERROR",
}
STATUS_OF_TYPE = {
    "CompilationError": "COMPILE_ERROR",
    "CompileTimeAssertionFailure": "COMPILE_ERROR",
    "OutOfResources": "LAUNCH_ERROR",
    "OutOfMemoryError": "OOM",
    "MemoryError": "OOM",
}
MESSAGE_CHARACTERS = 2000


def describe(error: BaseException) -> dict:
    """{status, type, message} of an exception; the status is one of verify's."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    own = next((status for kind, status in STATUS_OF_OWN.items() if isinstance(error, kind)), None)
    by_type = [STATUS_OF_TYPE[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in STATUS_OF_TYPE]
    by_sign = [status for sign, status in STATUS_OF_SIGN.items() if sign in text]
    status = own or next(iter(by_type + by_sign), "RUNTIME_ERROR")
    message = str(error) if own or isinstance(error, problem.ContractError) else text
    if len(message) > MESSAGE_CHARACTERS:
        half = MESSAGE_CHARACTERS // 2
        message = f"{message[:half]} … {message[-half:]}"
    message = message.encode("utf-8", "backslashreplace").decode()  # half a character can be neither printed nor stored
    return {"status": status, "type": type(error).__name__, "message": message}


@contextlib.contextmanager
def blaming(kind: type[Exception]):
    """Errors inside are the file's, not the run's; compile errors and exhausted memory keep their own kind."""
    try:
        yield
    except Exception as error:
        if describe(error)["status"] != "RUNTIME_ERROR":
            raise
        raise kind(describe(error)["message"]) from error
