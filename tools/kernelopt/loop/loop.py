"""Rounds without a person: brief -> agent -> verify -> gate -> record, until a rule says stop. Its state is on disk before each step.

Killed at any point it goes on from there (ledger.py): what was accepted is in the records, and a candidate that waited for its verdict, or
was right while another agent of its round still worked, is judged.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from .. import bundle
from ..diagnosis import profile_folder
from ..errors import EnvironmentLacks, Refused, ToolError, UsageError
from ..gate import acceptance, history, readiness, rounds
from ..gate.measurement import Measurement
from ..measure.pairing import Comparison
from ..profilers import metrics
from ..session import record_store, stop_conditions, version_kernels
from ..session.workspace import Workspace, digest
from ..statuses import Status
from . import agents, executors, run_state, snapshot
from .run_state import State
from .strategies import Beam, Greedy

DIVERGED = 1.5  # a candidate that takes so many times the best's time is told as such; the best is put back anyway


@dataclass(frozen=True)
class Limits:
    """When to stop. patience: rounds without an accepted gain until it counts as stuck. restarts: partial restarts then."""

    rounds: int
    minutes: float
    agent_calls: int
    patience: int
    restarts: int
    refinements: int
    agent_timeout_s: float
    candidates: int = 1


class Machine(Protocol):
    """What needs a GPU (machine.Machine). brief: (version to start from, number of the candidate in its round) -> text, each with another direction.
    check: the files of a kernel and its plan -> (status, message). measure: kernels -> measurement of each against the best version,
    or why there is none, `slots` of them side by side. restart: a partial restart, or None when nothing can be masked. stop: end
    the verifications that run. final: how the best compares at the end, {name: comparison}."""

    slots: int

    def brief(self, version: str, number: int) -> str: ...
    def check(self, kernel: Path, plan: Path) -> tuple[str, str]: ...
    def measure(self, kernels: list[bytes]) -> list[Measurement | Refused]: ...
    def restart(self) -> str | None: ...
    def stop(self) -> None: ...
    def final(self) -> dict[str, Comparison]: ...


class Loop:
    """One workspace: each candidate starts from a version that the strategy names, and competes with the best."""

    def __init__(
        self,
        workspace: Workspace,
        agent: str,
        limits: Limits,
        machine: Machine,
        say: Callable[[str], None],
        strategy: Greedy | Beam,
    ):
        self.workspace, self.agent, self.limits, self.machine, self.say = workspace, agent, limits, machine, say
        self.strategy = strategy
        self.ledger = run_state.Ledger(workspace.root / ".loop")
        self.records = record_store.Memory(workspace)
        self.state = State()
        self.last_word: str | None = None  # of status.json
        self.stopping = threading.Event()
        self.best: dict | None = None  # as it was last told
        self._lock = threading.Lock()

    def begin(self, resume: bool) -> None:
        """UsageError when there is no baseline, or a former run was not finished and is not to be resumed."""
        if self.ledger.state_file.exists() and not resume:
            raise UsageError(
                f"{self.ledger.state_file} is of a run that did not end; go on with --resume, or remove it"
            )
        unfinished = self.reclaim(self.ledger.state())
        if self.records.best() is None:
            raise UsageError(
                "there is no accepted version to start from; make v0 first: the baseline skill, run_gate.py --version v0"
            )
        history.forget_unrecorded_commit(self.workspace)
        if unfinished:
            self.state = unfinished
        elif resume:
            self.say("no run is unfinished here: this one begins anew")
        if self.state.waiting:
            history.put_best_back(self.workspace)  # it may have been killed with a candidate in its place
        else:
            check_untouched(self.workspace, self.records)
        recorded = {agents.fingerprint(text) for text in kernels(self.workspace, self.records)}
        self.state.tried += sorted(recorded - {*self.state.tried})
        self._since = time.monotonic() - self.state.spent_s

    def reclaim(self, unfinished: State | None) -> State | None:
        """What a run that was killed has left is ended, put back and cleared away. Returns where it goes on."""
        self.ledger.open()
        agents.clear_desks(self.workspace)
        before = snapshot.Kept.left(self.workspace.root, unfinished.kept if unfinished else None)
        if before and (meddled := before.put_back(self.ledger.distrust)):
            self.say(
                f"changed since the run was killed or while agents worked, and put back: {', '.join(meddled[:5])}; what was there "
                f"lies in {self.ledger.folder / 'taken'}"
            )
        if unfinished:  # first: killed after the next line, it would miss what is gone
            unfinished = replace(self.ledger.state(), kept=None)
            self.ledger.save(unfinished)
        snapshot.discard(self.workspace.root)
        return unfinished

    @contextlib.contextmanager
    def guarded(self) -> Iterator[list[str]]:
        """Whatever others change in the workspace meanwhile is put back at the end, and named in the list that this gives."""
        meddled: list[str] = []
        before = snapshot.Kept.of(self.workspace)
        self.state.kept = before.digest
        self.save()
        try:
            yield meddled
        finally:
            meddled += before.put_back(self.distrust)
            self.state.kept = None
            self.save()
            snapshot.discard(self.workspace.root)

    def distrust(self) -> None:
        self.state = self.state.distrusted()
        self.save()

    def run(self, resume: bool = False) -> dict:
        """{reason, met, best, rounds, …, final} when a rule says stop. Until it returns, --resume comes to the same end again."""
        self.begin(resume)
        try:
            result = self.until_a_rule_stops()
            result["final"] = self.machine.final()
            self.done(result)
            return result
        except BaseException as error:
            self.last_word = f"ended by {type(error).__name__}: {error}"
            self.tell()  # and the state stays as it was before the step that was not done
            raise

    def until_a_rule_stops(self) -> dict:
        self.take_up()
        if self.state.waiting:
            self.judge_what_waits()
        while True:
            self.save()
            reason = stop_reason(self.state, self.limits, self.workspace.task()["targets"], self.records.best())
            if reason == STUCK and self.restarted():
                continue
            if reason == STUCK:
                reason = (
                    f"{STUCK} in the last {self.state.without_gain} rounds, and no partial restart is left or possible"
                )
            if reason:
                return self.ended(reason)
            self.round()

    def restarted(self) -> bool:
        """A partial restart, while the limits and the records allow one."""
        if self.state.restarts >= self.limits.restarts:
            return False
        stuck = self.state
        self.state = replace(stuck, restarts=stuck.restarts + 1, without_gain=0)
        self.save()  # first: killed after the masking, it must not mask a second half
        said = self.machine.restart()
        if said is None:
            self.state = stuck
            return False
        self.note("restart", None, said)
        self.save()
        return True

    def round(self) -> None:
        """Ask for the candidates side by side, then judge what came of it."""
        count = min(self.limits.candidates, self.limits.agent_calls - self.state.agent_calls)
        self.state.rounds += 1
        self.state.gained = False
        names = [f"round{self.state.rounds}-{number}" for number in range(count)]
        self.state.candidates = dict.fromkeys(names, "")
        self.save()
        starts = self.strategy.starts(self.records, count)
        kernels = [self.kernel_of(version) for version in starts]
        starts = [
            version if text else self.records.best()["version"] for version, text in zip(starts, kernels, strict=True)
        ]
        briefs = [self.machine.brief(version, number) for number, version in enumerate(starts)]
        with contextlib.ExitStack() as stack:
            desks = [
                stack.enter_context(agents.Desk(self.workspace, name, kernel or self.workspace.kernel.read_bytes()))
                for name, kernel in zip(names, kernels, strict=True)
            ]
            with self.guarded() as meddled:
                pairs = list(zip(desks, briefs, strict=True))
                answers = executors.side_by_side(self.answered, pairs, len(pairs), self.end_agents)
        if meddled:
            answers = [refused(meddled)] * len(answers)
        self.take(dict(zip(names, answers, strict=True)), self.state.rounds)
        self.judge_what_waits()

    def take_up(self) -> None:
        """Of a round in which the run was killed, what was right already waits; where that is nothing, the round is not counted."""
        if not self.state.candidates:
            return
        found = {name: self.ledger.read_if(name, digest) for name, digest in self.state.candidates.items()}
        answers = {name: agents.Answer("answered", "", *it) if it else INTERRUPTED for name, it in found.items()}
        number = self.state.rounds
        self.state.rounds -= not any(found.values())
        self.take(answers, number)

    def end_agents(self) -> None:
        """Told to stop: agents and verifications end, and no other begins."""
        self.stopping.set()
        agents.end_marked(self.ledger.folder / "desks")
        self.machine.stop()

    def kernel_of(self, version: str) -> bytes | None:
        """None where somebody has cleared rejected/ away."""
        try:
            return version_kernels.kernel_of(self.workspace, self.records.read(version))
        except UsageError:
            return None

    def answered(self, desk: agents.Desk, brief: str) -> agents.Answer:
        """`asked`; where an agent broke what that stands on, it has failed, and the round is put back."""
        try:
            return self.asked(desk, brief)
        except EnvironmentLacks:
            raise
        except (ToolError, *BROKEN) as error:
            return agents.Answer("failed", f"its answer could not be looked at: {error}")

    def asked(self, desk: agents.Desk, brief: str) -> agents.Answer:
        """The agent's answer, handed back with the verifier's words until it is right or the refinements are used up."""
        tried = set(self.state.tried)
        answer = agents.Answer("no call left", "the calls of the agent were used up")
        for attempt in range(1 + self.limits.refinements):
            with self._lock:
                if self.stopping.is_set() or self.state.agent_calls >= self.limits.agent_calls:
                    return answer
                self.state.agent_calls += 1
                self.say(f"{desk.name}: asking the agent, call {self.state.agent_calls}")
                self.save()
            answer = self.called(desk, brief, tried)
            if answer.outcome != "answered":
                return answer
            status, message = self.machine.check(*self.ledger.put_down(desk.name, answer.kernel, answer.plan))
            if status == Status.OK:
                with self._lock:
                    self.state.candidates[desk.name] = run_state.candidate_digest(answer.kernel, answer.plan)
                    self.save()
                return answer
            if attempt == self.limits.refinements:
                return replace(answer, outcome="refused plan", message=message) if status == Status.PLAN else answer
            self.note("refined", desk.name, message)
            if status not in (Status.PLAN, Status.CRASH):  # the kernel itself is wrong: it may not come back as it is
                tried.add(agents.fingerprint(answer.kernel))
            brief += REFINE.format(message=message, file="plan.md" if status == Status.PLAN else "kernel.py")
        return answer

    def called(self, desk: agents.Desk, brief: str, tried: set[str]) -> agents.Answer:
        """Desk.ask; a call of a command that does not exist was none."""
        try:
            return desk.ask(self.agent, brief, self.seconds_left(), tried)
        except EnvironmentLacks:
            with self._lock:
                self.state.agent_calls -= 1
                self.save()
            raise

    def seconds_left(self) -> float:
        """For the next call of the agent: its own time-out, or what the budget leaves."""
        left = 60 * self.limits.minutes - (time.monotonic() - self._since)
        return max(1.0, min(self.limits.agent_timeout_s, left))

    def take(self, answers: dict[str, agents.Answer], number: int) -> None:
        """Let the candidates of round `number` wait for the gate; or say why they are none."""
        none = {}
        for name, answer in answers.items():
            if answer.outcome != "answered":
                none[name] = answer
            elif agents.fingerprint(answer.kernel) in self.state.tried:
                none[name] = TWIN
            else:  # put down once more: another agent of the round may have been at the files
                self.ledger.put_down(name, answer.kernel, answer.plan)
                self.state.tried.append(agents.fingerprint(answer.kernel))
                self.state.waiting.append(name)
        self.state.candidates = {}
        self.save()  # first: killed between the lines, it must not ask for this round again
        for name, answer in none.items():
            self.note(answer.outcome, name, answer.message, number)

    def judge_what_waits(self) -> None:
        """Measure as many candidates side by side as there are GPUs, settle the fastest first. Who is faster than a version that
        was the best when it was measured, and is no longer, is measured again."""
        while self.state.waiting:
            if self.recorded():
                continue
            if self.lost():
                continue
            batch = self.state.waiting[: self.machine.slots]
            self.say(f"measuring {', '.join(batch)} against {self.records.best()['version']}")
            kernels = [self.ledger.candidate(name)[0].read_bytes() for name in batch]
            with self.guarded() as meddled:  # an agent's process may have outlived it
                found = dict(zip(batch, self.machine.measure(kernels), strict=True))
            if meddled:
                self.note("put back", None, f"changed while candidates were measured: {', '.join(meddled[:5])}")
            beaten = False
            for name in sorted(batch, key=lambda name: speed(found[name]), reverse=True):
                if not (beaten and speed(found[name])):
                    beaten |= self.settle(name, found[name])
        self.state.without_gain = 0 if self.state.gained else self.state.without_gain + 1
        self.save()

    def recorded(self) -> bool:
        """Was the first of those that wait settled just before a stop? Then that is taken note of."""
        version = self.state.version
        result = version in self.records.versions() and self.records.read(version)["quality_gate"]["result"]
        if result:
            noted = self.ledger.last_noted() == version  # it was killed between that line and the state
            self.settled(version, result == "PASS", "recorded before the stop", noted=noted)
        return bool(result)

    def lost(self) -> bool:
        """Is one of those that wait gone from the disk? Then that is taken note of."""
        for name in self.state.waiting:
            if not all(path.is_file() for path in self.ledger.candidate(name)):
                self.state.waiting.sort(key=lambda other: other != name)
                self.settled(name, False, "its files are gone from .loop/candidates", outcome="not judged")
                return True
        return False

    def settle(self, name: str, measurement: Measurement | Refused) -> bool:
        """Make a candidate the next version, accepted or not; was it accepted?"""
        version = self.state.version or self.records.next_version()  # a stop may have left its record without a verdict
        self.state.waiting.sort(key=lambda other: other != name)
        self.state.version = version
        self.save()
        if isinstance(measurement, Refused):
            history.put_best_back(self.workspace)
            return self.settled(name, False, str(measurement), outcome="not judged")
        kernel, plan = (path.read_bytes() for path in self.ledger.candidate(name))
        bundle.write_bytes(self.workspace.kernel, kernel)
        bundle.write_bytes(self.workspace.plan(version), plan)
        try:
            fields = readiness.check_ready(self.workspace, version)
        except (UsageError, Refused) as error:
            history.put_best_back(
                self.workspace
            )  # the plan says nothing, a figure is not cited, the kernel is the best
            own = agents.fingerprint(kernel.decode())
            self.state.tried = [other for other in self.state.tried if other != own]
            self.workspace.plan(version).unlink()  # it stays under .loop/candidates
            return self.settled(name, False, str(error), outcome="refused plan")
        diagnosis = profile_folder.evidence_for_round(self.workspace, version)
        result = rounds.settle(self.workspace, version, fields, measurement, diagnosis)
        slower = slowdown(result)
        outcome = "diverged" if slower and slower > DIVERGED else None
        return self.settled(version, result.decision.accepted, result.decision.reason, outcome)

    def settled(
        self, version: str, accepted: bool, reason: str, outcome: str | None = None, noted: bool = False
    ) -> bool:
        self.state.gained |= accepted
        self.state.without_gain = 0 if accepted else self.state.without_gain
        self.state.waiting.pop(0)
        self.state.version = None
        if not noted:
            self.note(outcome or ("accepted" if accepted else "rejected"), version, reason)
        self.save()
        return accepted

    def note(self, outcome: str, of: str | None, message: str, number: int | None = None) -> None:
        """Ledger.note, and progress. number: of the round, if not this one."""
        with self._lock:
            message = self.ledger.note(self.state.rounds if number is None else number, of, outcome, message)
        self.say(f"{of or 'loop'}: {outcome}: {message[:200]}")

    def now(self) -> str:
        if self.last_word:
            return self.last_word
        if self.state.waiting:
            return f"round {self.state.rounds}: judging {', '.join(self.state.waiting)}"
        return f"round {self.state.rounds}: asking the agent" if self.state.rounds else "beginning"

    def save(self) -> None:
        self.state.spent_s = time.monotonic() - self._since
        self.ledger.save(self.state)
        self.tell()

    def tell(self) -> None:
        """status.json, for whoever wants to know."""
        with contextlib.suppress(ToolError):  # an agent is at the records; they are put back after it
            self.best = self.records.best() or self.best
        best = self.best
        self.ledger.tell(
            {
                "now": self.now(),
                "at": record_store.now(),
                "pid": os.getpid(),
                "best": best["version"],
                "best_latency_us": best["performance"]["latency_us"],
                "rounds": self.state.rounds,
                "rounds_left": max(0, self.limits.rounds - self.state.rounds),
                "minutes_left": max(0.0, self.limits.minutes - self.state.spent_s / 60),
                "agent_calls": self.state.agent_calls,
            },
        )

    def done(self, result: dict) -> None:
        """The next run begins afresh."""
        self.note("stop", None, result["reason"])
        for name, comparison in result["final"].items():
            message = f"{comparison.verdict}, {comparison.describe()}"
            self.note("final", f"{result['best']} against {name}", message)
        self.last_word = f"stopped: {result['reason']}"
        self.tell()
        self.ledger.forget()

    def ended(self, reason: str) -> dict:
        """The result."""
        best = self.records.best()
        if digest(self.workspace.kernel) != best["kernel_sha256"]:
            history.put_best_back(self.workspace)
        self.last_word = f"measuring {best['version']} once more, then it stops: {reason}"
        self.say(self.last_word)
        self.save()
        return {
            "reason": reason,
            "met": stop_conditions.goal(self.workspace.task()["targets"], best)["met"],
            "best": best["version"],
            "latency_us": best["performance"]["latency_us"],
            "rounds": self.state.rounds,
            "agent_calls": self.state.agent_calls,
            "restarts": self.state.restarts,
            "minutes": round(self.state.spent_s / 60, 2),
        }


BROKEN = (NotADirectoryError, FileNotFoundError, FileExistsError, IsADirectoryError, PermissionError)
INTERRUPTED = agents.Answer("interrupted", "the run ended before it was right")
TWIN = agents.Answer("tried before", "another candidate of this round is the same")
STUCK = "no accepted gain"
REFINE = """

## {file} is not right yet

{message}

Mend {file} in this folder, and leave both kernel.py and plan.md there.
"""


def check_untouched(workspace: Workspace, records: record_store.Memory) -> None:
    """UsageError where somebody's own work would be written over: an edit of kernel.py, or a plan of the next version."""
    best, plan = records.best(), workspace.plan(records.next_version())
    if not workspace.kernel.is_file() or digest(workspace.kernel) != best["kernel_sha256"]:
        raise UsageError(
            f"kernel.py is not the accepted {best['version']}; let run_gate.py judge it, or put it back: "
            f"git -C {workspace.root} checkout -- kernel.py"
        )
    if plan.exists():
        raise UsageError(f"{plan} is the plan of a version that was not judged; judge it or move it away")


def kernels(workspace: Workspace, records: record_store.Memory) -> Iterator[str]:
    """The texts of all recorded kernels that are still there, masked ones too."""
    for record in records.records(masked=True):
        with contextlib.suppress(UsageError):
            yield version_kernels.kernel_of(workspace, record).decode(errors="replace")


def refused(meddled: list[str]) -> agents.Answer:
    """The answer of a round in which somebody changed the workspace: whose it was cannot be told, so none counts."""
    return agents.Answer(
        "forbidden files",
        f"{', '.join(meddled[:5])} in the workspace itself was changed in this round; that is put back",
    )


def stop_reason(state: State, limits: Limits, targets: list[dict], best: dict) -> str | None:
    """Why the loop stops now; None to go on. STUCK may be answered with a partial restart."""
    if stop_conditions.goal(targets, best)["met"]:
        return f"the targets are met by {best['version']}"
    share = best["performance"]["floor_share_pct"]
    if share is not None and share >= metrics.thresholds()["at_floor_pct"]:
        return f"{best['version']} is at {share:.1f} % of the floor: the problem allows little more"
    if state.rounds >= limits.rounds:
        return f"{limits.rounds} rounds are over"
    if state.spent_s >= 60 * limits.minutes:
        return f"{limits.minutes:g} minutes are over"
    if state.agent_calls >= limits.agent_calls:
        return f"{limits.agent_calls} calls of the agent are used up"
    if state.without_gain >= limits.patience:
        return STUCK
    return None


def speed(measurement: Measurement | Refused) -> float:
    """Its speed-up over the version that it was measured against, of a candidate that may be accepted; 0 of any other."""
    if isinstance(measurement, Refused):
        return 0.0
    decision = acceptance.decide(measurement.verdict, measurement.utilization, measurement.comparisons)
    return measurement.comparisons["default"].speedup if decision.accepted else 0.0


def slowdown(result: rounds.RoundResult) -> float | None:
    """How many times the best's time the candidate took on the default workload, where both were timed."""
    comparison = (result.measurement.comparisons or {}).get("default")
    return 1 / comparison.speedup if comparison else None
