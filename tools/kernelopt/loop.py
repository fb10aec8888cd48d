"""Rounds without a person: brief -> agent -> verify -> gate -> record, until a rule says stop. Its state is on disk before each step.

.loop/state.json is where it stands, .loop/rounds.jsonl what each round came to, status.json beside them what it does now. Killed at any
point it goes on from there: what was accepted is in the records, and a candidate that waited for its gate is gated.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import agents, bundle, gate, memory, metrics
from .errors import Refused, UsageError
from .workspace import Workspace, digest

DIVERGED = 1.5  # a candidate that takes so many times the best's time is told as such; the best is put back anyway


@dataclass
class State:
    """Where the loop stands. phase: "ask" or "gate", of `version`. tried: fingerprints of all kernels that were judged."""

    phase: str = "ask"
    version: str | None = None
    rounds: int = 0
    agent_calls: int = 0
    without_gain: int = 0
    restarts: int = 0
    spent_s: float = 0.0
    tried: list[str] = field(default_factory=list)


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


@dataclass(frozen=True)
class Machine:
    """What needs a GPU. brief: (workspace, version) -> text. check: a kernel's file -> (status, message). judge: version ->
    run_gate's result. restart: a partial restart, or None when nothing can be masked."""

    brief: Callable[[str], str]
    check: Callable[[Path], tuple[str, str]]
    judge: Callable[[str], dict]
    restart: Callable[[], str | None]


class Loop:
    """One workspace, one agent, greedy: each candidate is made from the best version."""

    def __init__(self, workspace: Workspace, agent: str, limits: Limits, machine: Machine, say: Callable[[str], None]):
        self.workspace, self.agent, self.limits, self.machine, self.say = workspace, agent, limits, machine, say
        self.folder = workspace.root / ".loop"
        self.records = memory.Memory(workspace)
        self.state = State()

    def begin(self, resume: bool) -> None:
        """UsageError when there is no baseline, or a former run was not finished and is not to be resumed."""
        if self.records.best() is None:
            raise UsageError(
                "there is no accepted version to start from; make v0 first: the baseline skill, run_gate.py --version v0"
            )
        self.folder.mkdir(exist_ok=True)
        bundle.write_text(self.folder / ".gitignore", "*\n")
        kept = self.folder / "state.json"
        if resume and kept.exists():
            self.state = State(**bundle.read_json(kept))
        elif kept.exists():
            raise UsageError(f"{kept} is of a run that did not end; go on with --resume, or remove it")

    def run(self, resume: bool = False) -> dict:
        """{reason, best, rounds, …} when a rule says stop."""
        self.begin(resume)
        since = time.monotonic()
        spent = self.state.spent_s
        if self.state.phase == "gate":
            self.gate_what_waits()
        while True:
            self.state.spent_s = spent + time.monotonic() - since
            reason = stop_reason(self.state, self.limits, self.workspace.task()["targets"], self.records.best())
            if reason == STUCK and self.restarted():
                continue
            if reason:
                return self.ended(reason)
            self.round()

    def restarted(self) -> bool:
        """A partial restart, while the limits and the records allow one."""
        if self.state.restarts >= self.limits.restarts or (said := self.machine.restart()) is None:
            return False
        self.state.restarts, self.state.without_gain = self.state.restarts + 1, 0
        self.note("restart", None, said)
        self.save()
        return True

    def round(self) -> None:
        version = self.records.next_version()
        self.state.version, self.state.phase = version, "ask"
        self.state.rounds += 1
        self.save()
        with agents.Desk(self.workspace, version, version) as desk:
            answer = self.answered(desk, self.machine.brief(version))
        if answer.outcome != "answered":
            self.state.without_gain += 1
            self.note(answer.outcome, version, answer.message)
            self.save()
            return
        self.put_before_the_gate(version, answer)
        self.gate_what_waits()

    def answered(self, desk: agents.Desk, brief: str) -> agents.Answer:
        """The agent's answer, handed back with the verifier's words until it is right or the refinements are used up."""
        tried = set(self.state.tried)
        for attempt in range(1 + self.limits.refinements):
            self.say(f"{desk.version}: asking the agent, call {self.state.agent_calls + 1}")
            self.state.agent_calls += 1
            self.save()
            answer = desk.ask(self.agent, brief, self.limits.agent_timeout_s, tried)
            if answer.outcome != "answered":
                return answer
            status, message = self.machine.check(desk.path / "kernel.py")
            if (
                status == "OK"
                or attempt == self.limits.refinements
                or self.state.agent_calls >= self.limits.agent_calls
            ):
                return answer
            self.note("refined", desk.version, message)
            tried.add(agents.fingerprint(answer.kernel))
            brief += REFINE.format(status=status, message=message)
        return answer

    def put_before_the_gate(self, version: str, answer: agents.Answer) -> None:
        """The candidate is on disk, and the state says so, before the gate begins."""
        waiting = self.folder / "candidates"
        bundle.write_text(waiting / f"{version}.py", answer.kernel)
        bundle.write_text(waiting / f"{version}_plan.md", answer.plan)
        self.state.tried.append(agents.fingerprint(answer.kernel))
        self.state.phase = "gate"
        self.save()

    def gate_what_waits(self) -> None:
        """Gate the candidate that the state names, unless its verdict is recorded already."""
        version, waiting = self.state.version, self.folder / "candidates"
        if version in self.records.versions() and self.records.read(version)["quality_gate"]["result"]:
            self.settled(
                version, self.records.read(version)["quality_gate"]["result"] == "PASS", "recorded before the stop"
            )
            return
        bundle.write_bytes(self.workspace.kernel, (waiting / f"{version}.py").read_bytes())
        bundle.write_bytes(self.workspace.plan(version), (waiting / f"{version}_plan.md").read_bytes())
        try:
            result = self.machine.judge(version)
        except (
            UsageError,
            Refused,
        ) as error:  # a plan that says nothing, a figure that is not cited, a kernel that is the best
            self.put_best_back()
            self.settled(version, False, f"not judged: {error}", outcome="refused plan")
            return
        slower = slowdown(result)
        outcome = "diverged" if slower and slower > DIVERGED else None
        self.settled(version, result["accepted"], result["reason"], outcome)

    def put_best_back(self) -> None:
        best = self.records.best()
        bundle.write_bytes(self.workspace.kernel, self.workspace.file_at(best["git_commit_hash"], "kernel.py"))

    def settled(self, version: str, accepted: bool, reason: str, outcome: str | None = None) -> None:
        self.state.without_gain = 0 if accepted else self.state.without_gain + 1
        self.state.phase = "ask"
        self.note(outcome or ("accepted" if accepted else "rejected"), version, reason)
        self.save()

    def note(self, outcome: str, version: str | None, message: str) -> None:
        """A line of rounds.jsonl, and of progress."""
        line = {
            "at": memory.now(),
            "round": self.state.rounds,
            "version": version,
            "outcome": outcome,
            "message": message[:500],
        }
        with open(self.folder / "rounds.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.say(f"{version or 'loop'}: {outcome}: {message[:200]}")

    def save(self) -> None:
        bundle.write_json(self.folder / "state.json", asdict(self.state))
        best = self.records.best()
        bundle.write_json(
            self.folder / "status.json",
            {
                "now": f"{self.state.phase} {self.state.version}",
                "best": best["version"],
                "best_latency_us": best["performance"]["latency_us"],
                "rounds": self.state.rounds,
                "rounds_left": max(0, self.limits.rounds - self.state.rounds),
                "minutes_left": max(0.0, self.limits.minutes - self.state.spent_s / 60),
                "agent_calls": self.state.agent_calls,
            },
        )

    def ended(self, reason: str) -> dict:
        """The result; the state is put away, so that the next run begins afresh."""
        best = self.records.best()
        if digest(self.workspace.kernel) != best["kernel_sha256"]:
            self.put_best_back()
        self.note("stop", None, reason)
        (self.folder / "state.json").unlink(missing_ok=True)
        return {
            "reason": reason,
            "best": best["version"],
            "latency_us": best["performance"]["latency_us"],
            "rounds": self.state.rounds,
            "agent_calls": self.state.agent_calls,
            "restarts": self.state.restarts,
            "minutes": round(self.state.spent_s / 60, 2),
        }


STUCK = "no accepted gain"
REFINE = """

## Your kernel is not right yet

The verifier says {status}: {message}

Mend kernel.py in this folder; keep the plan, or put it right.
"""


def stop_reason(state: State, limits: Limits, targets: list[dict], best: dict) -> str | None:
    """Why the loop stops now; None to go on. STUCK may be answered with a partial restart. Pure."""
    if targets and gate.goal(targets, best)["met"]:
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


def slowdown(result: dict) -> float | None:
    """How many times the best's time the candidate took on the default workload, where both were timed."""
    compared = (result["timing"]["comparisons"] or {}).get("default")
    return 1 / compared["speedup"]["point"] if compared else None
