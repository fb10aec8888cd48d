"""Is a kernel right? Inputs, candidate and oracle each in a process of its own; the verdict is made here
(correctness.py).

1. `prepare` writes the inputs of every workload, seed and variant (variants.py) to files.
2. `run` loads the candidate, and nothing of the reference, and stores its raw outputs.
3. `check`, which never loads the candidate, makes the inputs anew, computes the reference in float64 and compares.
4. At the gate, compute-sanitizer looks at the memory accesses of one more run.
"""

import shutil
import tempfile

from ..errors import EnvironmentLacks
from .sandbox import Outcome

# What a child process can report of itself; anything else in a report is forged.
CANDIDATE_FAULTS = (
    "COMPILE_ERROR",
    "IMPORT_ERROR",
    "LAUNCH_ERROR",
    "RUNTIME_ERROR",
    "ILLEGAL_ACCESS",
    "OOM",
    "NO_SPACE",
    "OPPONENT",
    "CHEAT_SUSPECT",
)
FULL_DISK_BYTES = 1 << 30


def fault_of(report: dict) -> dict | None:
    """The error in a child's report, if it is one that a candidate can have."""
    fault = report.get("error")
    sound = (
        isinstance(fault, dict) and fault.get("status") in CANDIDATE_FAULTS and isinstance(fault.get("message"), str)
    )
    if sound:
        no_space(fault)
    return fault if sound else None


def no_space(fault: dict) -> None:
    """EnvironmentLacks when the disk is full; a kernel may say so as well, and then it is the kernel's fault."""
    if fault["status"] == "NO_SPACE":
        if shutil.disk_usage(tempfile.gettempdir()).free < FULL_DISK_BYTES:
            place = f"{tempfile.gettempdir()} or the workspace"
            raise EnvironmentLacks(f"no space left in {place} for inputs and outputs; free some, or set TMPDIR")
        fault["status"] = "RUNTIME_ERROR"


def failure(outcome: Outcome) -> dict | None:
    """{error} when a child left no sound result behind; None when it did."""
    if outcome.timed_out:
        return error("TIMEOUT", f"no answer after {outcome.wall_s:.0f} s")
    if outcome.forged:
        return error("CHEAT_SUSPECT", "the kernel wrote to the channel that its judge reports on")
    if outcome.result is not None and "error" not in outcome.result:
        return None
    if outcome.result is not None:
        fault = fault_of(outcome.result)
        return {"error": fault} if fault else error("RUNTIME_ERROR", "the process left no sound report")
    if outcome.signal in ("SIGSEGV", "SIGBUS"):
        return error("ILLEGAL_ACCESS", f"the process died of {outcome.signal}")
    if outcome.signal:
        return error("RUNTIME_ERROR", f"the process died of {outcome.signal}")
    return error("RUNTIME_ERROR", f"the process ended with exit code {outcome.exit_code} and left no result")


def error(status: str, message: str) -> dict:
    return {"error": {"status": status, "type": "process", "message": message}}
