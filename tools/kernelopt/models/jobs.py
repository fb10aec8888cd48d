"""Jobs of the worker that run a user's model."""

import os
import re
from pathlib import Path

from ..device import outcomes
from ..device.fork_server import ANSWER_GRACE_S
from ..device.outcomes import Outcome
from ..device.pipes import last_line
from ..device.processes import STACK_FILE
from ..device.sandbox import Sandbox
from ..device.standing import Ended, Standing
from ..errors import Refused, TimedOut, UsageError
from ..statuses import Status

MEMORY = "code outside of Python used memory that is not its own: a kernel without a mask, or an extension; mend it"
MENDS = {  # by the signal that ended a model's process
    "SIGKILL": "most likely the machine had no memory left; use smaller inputs or weights, or a machine with more",
    "SIGSEGV": MEMORY,
    "SIGBUS": MEMORY,
}


def run(sandbox: Sandbox, job: str, arguments: dict, timeout_s: float) -> dict:
    """The result of a job. UsageError where the model's file lacks something, Refused where the job cannot be done with
    it, TimedOut."""
    environment = {**model_caches(), "PYTHONFAULTHANDLER": "1"}
    process = Standing(sandbox, sandbox.server(), job, arguments, timeout_s, environment=environment)
    try:
        outcome, phase = followed(process, timeout_s)
        own = [Path(arguments["model"]).parent, Path(arguments.get("folder", process.folder))]
        place = place_in(Path(process.folder, STACK_FILE), own)
    finally:
        process.end()
    outcome = sandbox.usable(outcome)
    if outcome.timed_out:
        raise TimedOut(
            f"the model did not finish in {timeout_s:.0f} s: it was still {phase}; --timeout raises the limit"
        )
    error = outcome.result.get("error") if outcome.result else None
    if error and error["status"] == Status.USAGE:
        raise UsageError(error["message"])
    if error:
        fault = outcomes.Fault(Status(error["status"]), error["message"])
        raise Refused(outcomes.unless_disk_is_full(fault).message)
    if fault := outcomes.failure(outcome):
        raise Refused(death(fault, outcome, phase, place))
    return outcome.result


def followed(process: Standing, timeout_s: float) -> tuple[Outcome, str]:
    """(how a job ended, what it did last)"""
    phase = "starting its process"
    while True:
        try:
            phase = process.answer(timeout_s + ANSWER_GRACE_S)["phase"]
        except Ended as ended:
            return ended.outcome, phase


def death(fault: outcomes.Fault, outcome: Outcome, phase: str, place: str | None) -> str:
    """The sentence on a job that left no result."""
    at = f", at {place}" if place else ""
    said = f"; it said: {last_line(outcome.log_tail)}" if outcome.log_tail.strip() else ""
    mend = MENDS.get(outcome.signal, "run the model by itself, without this tool, to see more")
    return f"the model did not get through: {fault.message} while it was {phase}{at}{said}; {mend}"


def place_in(stack: Path, folders: list[Path]) -> str | None:
    """The innermost place in files of these folders in a stack that faulthandler wrote; else the innermost of all; None
    where there is no stack."""
    text = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    places = re.findall(r'File "(.+?)", line (\d+) in (.+)', text)
    own = [one for one in places if any(map(Path(one[0]).is_relative_to, folders))]
    return next((f"{Path(file).name}:{line} ({name})" for file, line, name in own or places), None)


def model_caches() -> dict[str, str]:
    """Where the user's models and data sets lie, which the sandbox's own home would hide. There is no network."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = {"HF_HOME": str(home / "huggingface"), "TORCH_HOME": str(home / "torch")}
    return {**{name: os.environ.get(name, path) for name, path in own.items()}, "HF_HUB_OFFLINE": "1"}
