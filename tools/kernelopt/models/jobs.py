"""Jobs of the worker that run a user's model."""

import os
from pathlib import Path

from ..device import outcomes
from ..device.pipes import last_line
from ..device.sandbox import Sandbox
from ..device.standing import Standing
from ..errors import Refused, TimedOut, UsageError
from ..statuses import Status


def run(sandbox: Sandbox, job: str, arguments: dict, timeout_s: float) -> dict:
    """The result of a job. UsageError where the model's file lacks something, Refused where the job cannot be done with
    it, TimedOut."""
    process = Standing(sandbox, sandbox.server(), job, arguments, timeout_s, environment=model_caches())
    try:
        outcome = process.wait(timeout_s)
    finally:
        process.end()
    if outcome.timed_out:
        raise TimedOut(f"the model did not finish in {timeout_s:.0f} s; --timeout raises the limit")
    error = outcome.result.get("error") if outcome.result else None
    if error and error["status"] == Status.USAGE:
        raise UsageError(error["message"])
    if error:
        fault = outcomes.Fault(Status(error["status"]), error["message"])
        raise Refused(outcomes.unless_disk_is_full(fault).message)
    if fault := outcomes.failure(outcome):
        raise Refused(f"the model's process failed: {fault.message}; it said: {last_line(outcome.log_tail.encode())}")
    return outcome.result


def model_caches() -> dict[str, str]:
    """Where the user's models and data sets lie, which the sandbox's own home would hide. There is no network."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = {"HF_HOME": str(home / "huggingface"), "TORCH_HOME": str(home / "torch")}
    return {**{name: os.environ.get(name, path) for name, path in own.items()}, "HF_HUB_OFFLINE": "1"}
