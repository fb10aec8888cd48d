"""Errors in a child process, as statuses."""

import contextlib
from typing import TypedDict

from ..statuses import Status
from . import compiler_errors, contract, interpreter_limits


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
    contract.UnknownWorkload: Status.USAGE,
    contract.TooLargeToInterpret: Status.USAGE,
    contract.CastOfQuantised: Status.USAGE,
    contract.WrongModelFile: Status.USAGE,
    contract.UnsupportedInput: Status.INVALID_TASK,
    NoGpuError: Status.NO_GPU,  # a fault of the machine: sandbox.Sandbox turns it into exit code 3
    LoadError: Status.IMPORT_ERROR,
    OracleError: Status.INVALID_REFERENCE,
    BaselineError: Status.BASELINE_ERROR,
    CheatError: Status.CHEAT_SUSPECT,
    HangError: Status.TIMEOUT,
}
STATUS_OF_SIGN = {  # the first sign found in the message decides
    "Error building extension": Status.COMPILE_ERROR,
    "PassManager::run failed": Status.COMPILE_ERROR,
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
    "PTXASError": Status.COMPILE_ERROR,
    "OutOfResources": Status.LAUNCH_ERROR,
    "OutOfMemoryError": Status.OOM,
    "MemoryError": Status.OOM,
}
MESSAGE_CHARACTERS = 2000
PASSED_OVER = "a source was refused by the compiler before, and the file went on without it:"


class ErrorJson(TypedDict):
    """An exception as the parent reads it (device.outcomes). type: the name of its class."""

    status: Status
    type: str
    message: str


def describe(error: BaseException) -> ErrorJson:
    """The status, one of verify's, and the message of an exception. A failed compilation that the exception followed is
    told in its place."""
    status, message = status_of(error), text_of(error)
    if status == Status.RUNTIME_ERROR and (lack := interpreter_limits.of(error)):
        own = lack == interpreter_limits.NO_CUDA_CPP
        message = lack if own else f"Triton's CPU interpreter {lack} ({shortened(message)})"
        return ErrorJson(status=Status.NOT_INTERPRETABLE, type=type(error).__name__, message=message)
    if own_status(error) or isinstance(error, contract.ContractError):
        message = str(error)
    if not own_status(error) and (first := first_compile_error(error)):
        message = first if status == Status.COMPILE_ERROR else f"{first}\nthen {shortened(message)}"
        status = Status.COMPILE_ERROR
    else:
        message = shortened(message)
    if status in (Status.RUNTIME_ERROR, Status.IMPORT_ERROR) and (passed_over := passed_over_errors()):
        message += f"\n{passed_over}"
    message = message.encode("utf-8", "backslashreplace").decode()  # half a character can be neither printed nor stored
    return {"status": status, "type": type(error).__name__, "message": message}


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def own_status(error: BaseException) -> Status | None:
    """The status of an exception that this package raises; None of any other."""
    return next((status for kind, status in STATUS_OF_OWN.items() if isinstance(error, kind)), None)


def status_of(error: BaseException) -> Status:
    """The status of an exception by itself, whatever it followed."""
    if own := own_status(error):
        return own
    by_type = [STATUS_OF_TYPE[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in STATUS_OF_TYPE]
    by_sign = [status for sign, status in STATUS_OF_SIGN.items() if sign in text_of(error)]
    return next(iter(by_type + by_sign), Status.RUNTIME_ERROR)


def first_compile_error(error: BaseException) -> str | None:
    """The compiler's errors of the first compilation that failed on the way to an exception: of those that it followed,
    else one that the candidate caught. None for an exception with another status."""
    if status_of(error) not in (Status.COMPILE_ERROR, Status.RUNTIME_ERROR):
        return None
    failed = [one for one in compiler_errors.chain(error) if status_of(one) == Status.COMPILE_ERROR]
    if failed:
        return compiler_errors.errors_of(f"{text_of(failed[-1])}\n{compiler_errors.output_of(failed[-1])}".strip())
    return (caught := compiler_errors.noted()) and compiler_errors.errors_of(caught)


def passed_over_errors() -> str | None:
    """The errors of an extension that failed before another one was built; the file may not have meant that."""
    failed = compiler_errors.passed_over()
    return failed and f"{PASSED_OVER}\n{compiler_errors.errors_of(failed)}"


def shortened(message: str) -> str:
    """The start and the end of a long message."""
    half = MESSAGE_CHARACTERS // 2
    return message if len(message) <= MESSAGE_CHARACTERS else f"{message[:half]} … {message[-half:]}"


@contextlib.contextmanager
def blaming(kind: type[Exception]):
    """Blame errors inside the block on the file. Compile errors and exhausted memory keep their own kind, and so does
    what the interpreter cannot run, but for a reference, which runs outside of it."""
    blamed = (Status.RUNTIME_ERROR, Status.NOT_INTERPRETABLE) if kind is OracleError else (Status.RUNTIME_ERROR,)
    try:
        yield
    except Exception as error:
        if describe(error)["status"] not in blamed:
            raise
        raise kind(describe(error)["message"]) from error
