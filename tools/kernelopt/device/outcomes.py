"""How a child process ended: with the result that it reported, or with a fault."""

import shutil
import signal
import tempfile
from dataclasses import dataclass, field

from ..errors import EnvironmentLacks
from ..statuses import Status
from .child_process import Exit
from .pipes import Report

# The statuses that a child process can report; any other status in a report is forged.
CANDIDATE_FAULTS = (
    Status.COMPILE_ERROR,
    Status.IMPORT_ERROR,
    Status.LAUNCH_ERROR,
    Status.RUNTIME_ERROR,
    Status.ILLEGAL_ACCESS,
    Status.OOM,
    Status.TIMEOUT,
    Status.NO_SPACE,
    Status.BASELINE_ERROR,
    Status.CHEAT_SUSPECT,
    Status.NOT_INTERPRETABLE,
)
FULL_DISK_BYTES = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """How a child ended. result: the report of its job; None when it died before. marks: name -> (seconds on this
    process's clock, calls so far). forged: a message came that the job did not send."""

    result: dict | None
    exit_code: int | None
    signal: str | None
    timed_out: bool
    wall_s: float
    log_tail: str
    marks: dict[str, tuple[float, int]] = field(default_factory=dict)
    forged: bool = False


def outcome(ended: Exit, report: Report, log: str) -> Outcome:
    """The outcome of a process that ended like this, of whose job this is the report. log: the end of its log."""
    code = ended.exit_code
    return Outcome(
        result=report.result,
        exit_code=code if code is not None and code >= 0 else None,
        signal=signal_name(-code) if code is not None and code < 0 and not ended.timed_out else None,
        timed_out=ended.timed_out,
        wall_s=round(ended.wall_s, 3),
        log_tail=log,
        marks=report.marks,
        forged=report.forged or report.unfinished(),
    )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Fault:
    """Why something counts as failed or wrong. message: for a reader, without the status."""

    status: Status
    message: str


def fault_of(report: dict) -> Fault | None:
    """The error in a child's report, if it is one that a candidate can have. EnvironmentLacks when the disk is full."""
    error = report.get("error")
    sound = (
        isinstance(error, dict) and error.get("status") in CANDIDATE_FAULTS and isinstance(error.get("message"), str)
    )
    return unless_disk_is_full(Fault(Status(error["status"]), error["message"])) if sound else None


def unless_disk_is_full(fault: Fault) -> Fault:
    """The fault; EnvironmentLacks when the disk is full. When a kernel claims a full disk and it is not, the fault is
    the kernel's."""
    if fault.status != Status.NO_SPACE:
        return fault
    if shutil.disk_usage(tempfile.gettempdir()).free < FULL_DISK_BYTES:
        place = f"{tempfile.gettempdir()} or the workspace"
        raise EnvironmentLacks(f"no space left in {place} for inputs and outputs; free some, or set TMPDIR")
    return Fault(Status.RUNTIME_ERROR, fault.message)


def failure(outcome: Outcome) -> Fault | None:
    """The reason why a child left no sound result; None when it left one."""
    if outcome.timed_out:
        return Fault(Status.TIMEOUT, f"no answer after {outcome.wall_s:.0f} s")
    if outcome.forged:
        return Fault(Status.CHEAT_SUSPECT, "the kernel wrote to the channel that its judge reports on")
    if outcome.result is not None and "error" not in outcome.result:
        return None
    if outcome.result is not None:
        return fault_of(outcome.result) or Fault(Status.RUNTIME_ERROR, "the process left no sound report")
    if outcome.signal in ("SIGSEGV", "SIGBUS"):
        return Fault(Status.ILLEGAL_ACCESS, f"the process died of {outcome.signal}")
    if outcome.signal:
        return Fault(Status.RUNTIME_ERROR, f"the process died of {outcome.signal}")
    code = outcome.exit_code
    return Fault(Status.RUNTIME_ERROR, f"the process ended with exit code {code} and left no result")
