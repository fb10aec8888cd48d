"""compute-sanitizer's memcheck over one run of a kernel, beside its verification, which takes about as long."""

from dataclasses import replace
from pathlib import Path

from ..device import outcomes, programs
from ..device.beside import Beside
from ..device.outcomes import Fault, Outcome
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks
from ..statuses import Status
from . import runs
from .cases import Case
from .failures import HINTS
from .verdict import SanitizerRun, Verdict

LARGEST_BYTES = 256 << 20  # of inputs: compute-sanitizer slows a kernel down by a factor of some tens
LEAST_WAIT_S, WAIT_TIMES = 60.0, 20  # for it to end after the other runs: at least, and by what those took
ERRORS_FOUND = 86  # the exit code by which compute-sanitizer says that it reports errors


class Memcheck:
    """A run of the kernel under compute-sanitizer. Its process starts and ends with the block, so that it is ready when
    the inputs are.

    why_not: the reason why there is none.
    """

    def __init__(self, sandbox: Sandbox, kernel: Path, reference: Path, timeout_s: float):
        program = programs.find("compute-sanitizer")
        obstacles = {
            "there is no GPU": sandbox.gpu is None,
            "it is neither on the PATH nor in the CUDA toolkit": program is None,
        }
        self.why_not = next((reason for reason, holds in obstacles.items() if holds), None)
        self._sandbox, self._kernel, self._reference, self._timeout_s = sandbox, kernel, reference, timeout_s
        self._tool = [program, "--tool", "memcheck", "--show-backtrace", "no", "--print-limit", "1"]
        self._tool += ["--error-exitcode", str(ERRORS_FOUND)]
        self._run: Beside | None = None
        self._outcome: Outcome | None = None

    def __enter__(self) -> "Memcheck":
        if self.why_not is None:
            # Every tensor gets its own allocation: an access out of bounds would hit its neighbour in torch's pool.
            environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            self._run = Beside(self._sandbox, self._tool, "run", self._timeout_s, **environment)
        return self

    def __exit__(self, *exc) -> None:
        if self._run:
            self._run.end()

    def begin(self, cases: list[Case]) -> None:
        """Begin the run, on one of the cases."""
        if self._run is None:
            return
        small = [case for case in cases if case.bytes() <= LARGEST_BYTES]
        if not small:
            self.give_up("all inputs are too large for it")
            return
        path = f"{self._sandbox.new_folder('outputs')}/output"
        arguments = runs.run_arguments(
            self._kernel, small[:1], path, hang_s=self._timeout_s, guarded=False, trace=False
        )
        self._run.begin(arguments, runs.hidden_files(self._kernel, self._reference, cases))

    def wait(self, others_s: float) -> None:
        """Wait for the run to end. The kernel's other runs are over; they took `others_s`. Far later it is given up."""
        limit_s = max(LEAST_WAIT_S, WAIT_TIMES * others_s)
        try:
            self._outcome = self._run and self._run.outcome(limit_s)
        except EnvironmentLacks as error:  # of its own process alone: the others have used the GPU
            self.give_up(str(error))
        if self._run and self._outcome is None:
            self.give_up(f"given up: it had not ended {limit_s:.0f} s after the other runs")

    def is_running(self) -> bool:
        return self._run is not None and self._run.is_running()

    def give_up(self, why: str) -> None:
        """End the run without a report."""
        self._run.end()
        self._run, self.why_not = None, why

    def judged(self, result: Verdict) -> Verdict:
        """The verdict on a right kernel, with memcheck's report or the reason why there is none."""
        return with_report(result, self._outcome, self._timeout_s) if self._outcome else without(result, self.why_not)


def with_report(result: Verdict, outcome: Outcome, timeout_s: float) -> Verdict:
    """The verdict with what compute-sanitizer reports of a run that ended so."""
    lines = [line.removeprefix("=========").strip() for line in outcome.log_tail.splitlines()]
    if outcome.exit_code == ERRORS_FOUND:
        return out_of_bounds(result, lines, outcome.log_tail)
    fault = fault_in(outcome)
    if not fault and any(line.startswith("ERROR SUMMARY") for line in lines):
        return replace(result, sanitizer=SanitizerRun(errors=0))
    if outcome.timed_out:
        return without(result, f"time-out after {timeout_s:.0f} s")
    last = next((line for line in reversed(lines) if line and not line.startswith("ERROR SUMMARY")), "it said nothing")
    return without(result, fault.message if fault and outcome.result is not None else last)


def fault_in(outcome: Outcome) -> Fault | None:
    """Why the kernel did not run to its end there, in its process or on the case. The tool counts 0 errors then too."""
    if fault := outcomes.failure(outcome):
        return fault
    return next((outcomes.fault_of(case) for case in outcome.result.get("cases", []) if "error" in case), None)


def out_of_bounds(result: Verdict, lines: list[str], log_tail: str) -> Verdict:
    """The verdict on a kernel of which compute-sanitizer reports errors, in these lines."""
    first = next((line for line in lines if line.startswith(("Invalid", "Program hit"))), "see the log")
    status = Status.OUT_OF_BOUNDS
    return replace(
        result,
        status=status,
        summary=f"{status}: compute-sanitizer: {first}; {HINTS[status]}",
        process=replace(result.process, log_tail=log_tail),
        sanitizer=SanitizerRun(errors="at least 1"),
    )


def without(result: Verdict, why: str) -> Verdict:
    """The verdict, which says why compute-sanitizer did not watch the kernel's memory accesses."""
    summary = f"{result.summary}; compute-sanitizer did not run: {why[:120]}"
    return replace(result, summary=summary, sanitizer=SanitizerRun(why_not=why))
