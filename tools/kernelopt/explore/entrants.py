"""The entrants of an exploration: candidates to be checked, and opponents, which are only timed."""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from .. import source_lines
from ..case_types import OracleCheck
from ..compiling.compiled import Compiled
from ..compiling.compiler import LEAST_S
from ..device import outcomes, standing
from ..device.fork_server import Server
from ..device.outcomes import Fault
from ..device.sandbox import Sandbox
from ..device.spent import Spent
from ..errors import Refused, Stopped
from ..measure import correctness, failures
from ..measure.cases import Case, files_of
from ..measure.correctness import CaseReport
from ..statuses import Status
from .candidates import Constants
from .resources import CompiledCall, Resources

T = TypeVar("T")  # what an answer is read as
HANG_S = 20.0  # for a launched kernel to end
LIFE_S = 3600.0  # of a process that nothing else has ended by then; an exploration takes minutes
# Once the first call of another has ended: so many times as long as that took, and at least so many seconds. Beside
# hanging kernels, whose processes share the GPU in turns, a right one may take ten times as long as alone.
QUICK_TIMES, LEAST_HANG_S = 20, 6.0
STUCK = {
    "loaded": "it did not load in {seconds:.0f} s",
    "launched": "its first call was not compiled and launched in {seconds:.0f} s",
    "ran": "its first call launched a kernel that did not end; it was given up {seconds:.0f} s after its start",
    "checked": "its calls on the checked inputs did not end in {seconds:.0f} s",
}
STAGES = tuple(STUCK)  # of the process; an opponent is not checked
NOT_YET = {  # before the end of a stage
    "loaded": "it had loaded",
    "launched": "its first call was compiled and launched",
    "ran": "its first call had ended",
    "checked": "its calls on the checked inputs had ended",
    "compared": "its outputs were compared",
}
STUCK_IN_INTERPRETER = (
    "its first call did not end in {seconds:.0f} s on the CPU, which interprets kernels: it hangs, or is slow there"
)
NOT_WAITED_FOR = "the candidates were checked by then, and only the first of --against is waited for longer"
NONE_RIGHT = "no candidate was right, so no opponent is waited for"
MORE_BUDGET = "a larger --budget-seconds gives it more time"
MORE_EACH = "a larger --candidate-seconds gives it more time"
NOT_STARTED = f"not started: the budget was over; {MORE_BUDGET}"


@dataclass(frozen=True)
class KeyMetrics:
    """Nsight Compute's metrics of the kernel that takes most of a call; None where one is missing."""

    kernel: str
    metrics: dict[str, float | None]

    def to_json(self) -> dict:
        return {"kernel": self.kernel, **self.metrics}


@dataclass(frozen=True)
class Sustained:
    """us: the mean time of calls back to back. window: begin and end, seconds since the epoch."""

    us: float
    window: list[float]


@dataclass
class Entrant:
    """One kernel of an exploration, and its results so far.

    rounds_us: one time of each round (race.time_of_turn), None where it did not run. process: None before it starts and
    after it ended. started: False where there was no time for it.
    """

    name: str
    file: Path
    config: Constants = field(default_factory=dict)
    is_opponent: bool = False  # timed and not checked; never kept
    is_probe: bool = False  # an opponent that a candidate's file states
    status: Status = Status.INTERNAL  # until it ran
    error: str | None = None
    process: standing.Standing | None = None
    rounds_us: list[float | None] = field(default_factory=list)
    calls_us: list[float] = field(default_factory=list)
    dropped: bool = False
    resources: Resources = field(default_factory=Resources)
    sustained_us: float | None = None
    sm_clock_mhz: float | None = None
    metrics: KeyMetrics | None = None
    compiled: Compiled | None = None
    origin: Path | None = None  # the user's file that `file` was made of
    started: bool = True

    @property
    def job(self) -> str:
        """The job of the worker that runs it."""
        compiles = self.is_opponent and "torch.compile(" in self.file.read_text(encoding="utf-8", errors="replace")
        return "contest_compiled" if compiles else "contest"

    def fail(self, fault: Fault) -> None:
        whole = fault.status == Status.COMPILE_ERROR  # the worker has left out all but the compiler's errors
        message = self.in_origin(fault.message)
        self.status, self.error = fault.status, message if whole else first_lines(message)
        if fault.status == Status.IMPORT_ERROR:
            self.error = f"{self.error}; {failures.HINTS[fault.status]}"
        self.end()

    def never_started(self, why: str) -> None:
        self.started = False
        self.fail(Fault(Status.TIMEOUT, why))

    def in_origin(self, message: str) -> str:
        """A message on `file` as one on the user's own file."""
        if self.origin is None or self.file.name not in message:
            return message
        with contextlib.suppress(OSError, UnicodeDecodeError):
            written, lines = (one.read_text(encoding="utf-8").splitlines() for one in (self.file, self.origin))
            return source_lines.named(message, self.file.name, written, self.origin.name, lines)
        return message

    def end(self) -> None:
        if self.process:
            self.process.end()
            self.process = None

    def time(self, timeout_s: float, calls: int) -> list[float] | None:
        """Times in microseconds of so many calls, cold; None when the process failed, and then `status` says how."""
        return self._ask(lambda answer: answer["us"], timeout_s, do="time", calls=calls)

    def move(self, timeout_s: float) -> None:
        """Have the inputs put elsewhere in the GPU's memory."""
        self._ask(lambda answer: None, timeout_s, do="move")

    def sustain(self, timeout_s: float, seconds: float) -> Sustained | None:
        """The time of calls back to back; None as for `time`."""
        order = {"do": "sustain", "seconds": seconds}
        return self._ask(lambda answer: Sustained(answer["us"], answer["window"]), timeout_s, **order)

    def describe(self, timeout_s: float, trace: Path) -> CompiledCall | None:
        """What a call's compiled code takes, and a trace of the call in the file `trace`; None as for `time`."""
        return self._ask(CompiledCall.from_json, timeout_s, do="describe", trace=str(trace))

    def _ask(self, read: Callable[[dict], T], timeout_s: float, **order) -> T | None:
        try:
            return read(self.process.ask(timeout_s, **order))
        except standing.Ended as ended:
            self.fail(fault_of(ended))
            return None


def fault_of(ended: standing.Ended) -> Fault:
    """The fault that ended a process early."""
    return outcomes.failure(ended.outcome) or Fault(Status.RUNTIME_ERROR, "the process ended early")


def first_lines(message: str, most: int = 12) -> str:
    """The start of a message, or its first error and the text after it."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if "error:" in line), 0)
    return "\n".join(lines[first : first + most])


class Starter:
    """Starts entrants side by side: load, compile, one call, outputs to files, and the oracle's comparison."""

    def __init__(
        self,
        sandbox: Sandbox,
        server: Server,
        inputs: list[Case],
        judge: "Judge",
        libraries: bool,
        candidate_s: float,
    ):
        """candidate_s: the time for each entrant to load, compile and run."""
        self.sandbox, self.server, self.inputs = sandbox, server, inputs
        self.judge, self.libraries, self.candidate_s = judge, libraries, candidate_s
        self.spent = Spent()  # of the exploration's phases
        self._quickest_s = math.inf  # from a launch to the end of a first call
        self._sooner: dict[str, tuple[float, str]] = {}  # opponents that must be ready by then, and why

    def start(self, entrant: Entrant, until: float) -> None:
        """Bring an entrant to where it can be timed, or to a status that says why it cannot. until: on the monotonic
        clock; it must have compiled and run by then. Stopped, with that status, when the sandbox was told to stop."""
        end, why = self._end(entrant, until, NOT_STARTED)
        if time.monotonic() + LEAST_S > end:
            entrant.never_started(why)
            return
        entrant.status, entrant.error, entrant.started = Status.INTERNAL, None, True  # it may have been started before
        limit = min((until, MORE_BUDGET), (time.monotonic() + self.candidate_s, MORE_EACH))
        folder = self.sandbox.new_folder("answers")
        inputs, hidden = [case.path for case in self.inputs], files_of(self.inputs)
        arguments = {"kernel": str(entrant.file), "inputs": inputs, "path": f"{folder}/output"}
        arguments["check"] = not entrant.is_opponent
        entrant.process = standing.Standing(self.sandbox, self.server, entrant.job, arguments, LIFE_S, hidden)
        try:
            for stage in STAGES[: 3 if entrant.is_opponent else 4]:
                done = self._reach(stage, entrant, limit[0])
            stage = "compared"
            fault = None if entrant.is_opponent else self.fault_in(CaseReport(**done["done"]), folder)
        except Stopped:
            entrant.fail(Fault(Status.TIMEOUT, f"stopped before {NOT_YET[stage]}"))
            raise
        except standing.Ended as ended:
            fault = self._fault_at(stage, entrant, ended, limit)
        if fault:
            entrant.fail(fault)
        else:
            entrant.status = Status.OK

    def _reach(self, stage: str, entrant: Entrant, until: float) -> dict:
        """The answer of an entrant's process at the end of a stage. Ended when there is none in time, Stopped as for
        `start`."""
        began = time.monotonic()
        if stage != "ran":
            return entrant.process.answer(functools.partial(self._left_s, entrant, began, until))
        answer = entrant.process.answer(self.hang_s)
        self._quickest_s = min(self._quickest_s, time.monotonic() - began)
        return answer

    def _fault_at(self, stage: str, entrant: Entrant, ended: standing.Ended, limit: tuple[float, str]) -> Fault:
        """The fault of a process that ended in a stage. limit: when it had to be ready, and what gives it more time."""
        fault = fault_of(ended)
        if fault.status != Status.TIMEOUT:
            return fault
        stuck = STUCK[stage] if self.sandbox.gpu or stage != "launched" else STUCK_IN_INTERPRETER
        stuck = stuck.format(seconds=ended.outcome.wall_s)
        return Fault(Status.TIMEOUT, stuck if stage == "ran" else f"{stuck}; {self._end(entrant, *limit)[1]}")

    def forget(self, entrants: list[Entrant]) -> None:
        """They have all the time there is, whatever `hurry` said."""
        for entrant in entrants:
            self._sooner.pop(entrant.name, None)

    def hurry(self, opponents: list[Entrant], until: float, why: str) -> None:
        """Have those that are not ready yet end at that time of the monotonic clock."""
        self._sooner |= {entrant.name: (until, why) for entrant in opponents}

    def _left_s(self, entrant: Entrant, began: float, until: float) -> float:
        """For a stage that began then, in seconds."""
        return max(0.1, self._end(entrant, until)[0] - began)

    def _end(self, entrant: Entrant, until: float, why: str = "") -> tuple[float, str]:
        """(when it must be ready, and why then): `until`, or what `hurry` said where that is sooner"""
        return min((until, why), self._sooner.get(entrant.name, (math.inf, "")))

    def hang_s(self) -> float:
        """How long a launched kernel may take to end."""
        return min(HANG_S, max(LEAST_HANG_S, QUICK_TIMES * self._quickest_s))

    def fault_in(self, report: CaseReport, folder: str) -> Fault | None:
        """The fault in the outputs in `folder`; None when there is no fault."""
        seeds = [case.seed for case in self.inputs]
        calls = [(seed, f"{folder}/output-{number}.pt") for number, seed in enumerate([*seeds, seeds[0]][:3])]
        calls = [call for call in calls if Path(call[1]).exists()]
        try:
            compared = self.judge.compare(calls)
        except standing.Ended as ended:
            return unjudged(ended)
        result = correctness.judge(self.inputs[0], report, compared, self.libraries)
        return None if result.status == Status.OK else Fault(result.status, result.message)


def unjudged(ended: standing.Ended) -> Fault:
    """The fault of an entrant whose outputs the oracle could not compare. Refused when the reference itself fails."""
    error = (ended.outcome.result or {}).get("error") or {}
    if error.get("status") == Status.INVALID_REFERENCE:
        raise Refused(f"{error['status']}: {first_lines(error['message'])}; {failures.HINTS[Status.INVALID_REFERENCE]}")
    fault = fault_of(ended)
    if fault.status == Status.OOM:
        return Fault(Status.OOM, "the oracle ran out of GPU memory beside the candidates")
    if fault.status == Status.TIMEOUT:
        return Fault(Status.TIMEOUT, f"the oracle was not ready in time; {MORE_BUDGET}")
    raise Refused(f"the reference fails beside the candidates: {fault.status}: {first_lines(fault.message)}")


class Judge:
    """The oracle in a process of its own, which computes the reference once per seed.

    start: starts that process. timeout_s: for each of its answers.
    """

    def __init__(self, start: Callable[[], standing.Standing], timeout_s: float):
        self._start, self._timeout_s, self._turn = start, timeout_s, threading.Lock()
        self._process, self._ready, self._has_ended = start(), False, False

    def compare(self, calls: list[tuple[int, str]]) -> OracleCheck:
        """The oracle's findings on the files that a case's calls left: [(seed, file)]. Ended when its process did not
        answer, from then on until `renew`."""
        with self._turn:
            try:
                if not self._ready:
                    self._process.answer(self._timeout_s)
                    self._ready = True
                return OracleCheck.from_json(self._process.ask(self._timeout_s, files=calls)["checked"])
            except standing.Ended:
                self._has_ended = True
                raise

    def renew(self) -> None:
        """Start the oracle again where its process has ended."""
        if self._has_ended:
            self._process, self._ready, self._has_ended = self._start(), False, False

    def end(self) -> None:
        self._process.end()
