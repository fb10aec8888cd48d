"""Rounds without a person: brief -> agent -> verify -> gate -> record, until a rule says stop.

The state is on disk before each step (progress.py). A killed run continues from there: the records hold the accepted
versions, and candidates that were valid or waited for their verdict are judged.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..errors import UsageError
from ..gate import history
from ..session import platforms, stop_conditions, version_kernels
from ..session.digests import digest
from ..session.record_store import RecordStore
from ..session.workspace import Workspace
from ..statuses import AgentOutcome
from .agent_sandbox import Answer
from .asking import Agents, Steps
from .clients import Client
from .executors import Executor
from .fingerprints import fingerprint
from .judging import Judge
from .progress import Progress
from .run_state import State
from .stopping import STUCK, Limits, LoopResult, stop_reason
from .strategies import Beam, Greedy

INTERRUPTED = Answer(AgentOutcome.INTERRUPTED, "the run ended before it was right")
TWIN = Answer(AgentOutcome.TRIED_BEFORE, "another candidate of this round is the same")


class Loop:
    """One workspace: each candidate starts from a version that the strategy names, and competes with the best."""

    def __init__(
        self,
        workspace: Workspace,
        agent: str,
        limits: Limits,
        steps: Steps,
        executor: Executor,
        say: Callable[[str], None],
        strategy: Greedy | Beam,
        wrapper: tuple[str, ...] = (),
        client: Client | None = None,
    ):
        self.workspace, self.limits, self.steps, self.strategy, self.say = workspace, limits, steps, strategy, say
        self.progress = Progress(workspace, limits, say)
        self.records = self.progress.records
        self.agents = Agents(agent, wrapper, limits, steps, executor.stop, self.progress, client)
        self.judge = Judge(executor, self.progress)

    @property
    def state(self) -> State:
        return self.progress.state

    def run(self, resume: bool = False) -> LoopResult:
        """Run until a rule says stop. Killed before it returns, it comes to the same end with --resume."""
        self.begin(resume)
        try:
            result = replace(self.run_until_stop(), final=self.steps.final())
            self.finish(result)
            return result
        except BaseException as error:
            self.progress.last_word = f"ended by {type(error).__name__}: {error}"
            self.progress.write_status()  # the state stays as it was before the step that was not done
            raise

    def begin(self, resume: bool) -> None:
        """UsageError without a baseline, or when a former run did not end and is not to be resumed."""
        if not resume:
            self.progress.refuse_unfinished()
        unfinished = self.progress.recover()
        if self.records.best() is None:
            raise UsageError(
                "there is no accepted version to start from; make v0 first: the baseline skill, "
                "run_gate.py --version v0"
            )
        history.forget_unrecorded_commit(self.workspace, self.records)
        if resume and not unfinished:
            self.say("there is no unfinished run; this one starts from the beginning")
        if unfinished and unfinished.waiting:  # the run may have been killed with a candidate in kernel.py's place
            history.put_best_back(self.workspace, self.records.best())
        else:
            check_untouched(self.workspace, self.records)
        recorded = {fingerprint(text) for text in recorded_kernels(self.workspace, self.records)}
        self.progress.start((unfinished or State()).with_tried(recorded))

    def run_until_stop(self) -> LoopResult:
        """Make rounds until a rule says stop. The result has no final comparisons yet."""
        self.resume_round()
        if self.state.waiting:
            self.judge.judge_waiting()
        while True:
            self.progress.save()
            task = self.workspace.task()
            best = self.records.best()
            share = platforms.floor_share_pct(self.workspace, task, best.latency_us)
            reason = stop_reason(self.state, self.limits, task.targets, best, share)
            if reason == STUCK:
                if self.restarted():
                    continue
                rounds = self.state.without_gain
                reason = f"{STUCK} in the last {rounds} rounds, and no partial restart is left or possible"
            if reason:
                return self.result(reason)
            self.round()

    def restarted(self) -> bool:
        """Make a partial restart, if the limits and the records allow one. Return whether it was made."""
        if self.state.restarts >= self.limits.restarts:
            return False
        stuck = self.state
        self.progress.apply(State.restarted)  # first: killed after the masking, it must not mask a second half
        message = self.steps.restart()
        if message is None:
            self.progress.apply(lambda _: stuck)
            return False
        self.progress.log("restart", None, message)
        return True

    def round(self) -> None:
        """Ask for candidates side by side, then judge them."""
        count = min(self.limits.candidates, self.limits.agent_calls - self.state.agent_calls)
        names = [f"round{self.state.rounds + 1}-{number}" for number in range(count)]
        self.progress.apply(State.round_begun, names)
        starts = dict(zip(names, self.strategy.starts(self.records, count), strict=True))
        self.enqueue(self.agents.ask_all(starts))
        self.judge.judge_waiting()

    def resume_round(self) -> None:
        """Enqueue the valid answers of the round in which the run was killed; without one, the round is not counted."""
        if not self.state.candidates:
            return
        answers = {name: self.stored_answer(name, sha256) for name, sha256 in self.state.candidates.items()}
        counted = any(answer is not INTERRUPTED for answer in answers.values())
        self.enqueue(answers, counted)

    def stored_answer(self, name: str, sha256: str) -> Answer:
        """The answer that a killed run found valid; INTERRUPTED without one."""
        texts = self.progress.files.read_candidate(name, sha256)
        return Answer(AgentOutcome.ANSWERED, "", *texts) if texts else INTERRUPTED

    def enqueue(self, answers: dict[str, Answer], counted: bool = True) -> None:
        """Let the valid candidates of a round wait for the gate, and log why the others do not.

        counted: whether the round counts. Its lines in the log have its number in any case.
        """
        number = self.state.rounds
        valid, failures = distinct(answers, set(self.state.tried))
        for name in valid:  # written once more: another agent of the round may have changed the files
            self.progress.files.write_candidate(name, answers[name].kernel, answers[name].plan)
        self.progress.apply(State.enqueued, valid, counted)  # before the log: killed in it, the run must not ask again
        for name, answer in failures.items():
            self.progress.log(answer.outcome, name, answer.message, number)

    def result(self, reason: str) -> LoopResult:
        """Put the best version back, and make the result without the final comparisons."""
        best = self.records.best()
        if digest(self.workspace.kernel) != best.kernel_sha256:
            history.put_best_back(self.workspace, best)
        self.progress.last_word = f"measuring {best.version} once more before the run stops: {reason}"
        self.say(self.progress.last_word)
        self.progress.save()
        return LoopResult(
            reason=reason,
            met=stop_conditions.are_met(self.workspace.task().targets, best),
            best=best.version,
            latency_us=best.latency_us,
            rounds=self.state.rounds,
            agent_calls=self.state.agent_calls,
            restarts=self.state.restarts,
            minutes=round(self.state.spent_s / 60, 2),
        )

    def finish(self, result: LoopResult) -> None:
        """Log the result. The next run starts from the beginning."""
        self.progress.log("stop", None, result.reason)
        for name, comparison in result.final.items():
            message = f"{comparison.verdict}, {comparison.describe()}"
            self.progress.log("final", f"{result.best} against {name}", message)
        self.progress.last_word = f"stopped: {result.reason}"
        self.progress.write_status()
        self.progress.files.remove_state()


def distinct(answers: dict[str, Answer], tried: set[str]) -> tuple[dict[str, str], dict[str, Answer]]:
    """({name: fingerprint} of the candidates to judge, {name: answer} of the others). Pure.

    tried: fingerprints of kernels that were judged already. Of twins in one round the first is judged.
    """
    valid: dict[str, str] = {}
    failures: dict[str, Answer] = {}
    for name, answer in answers.items():
        if answer.outcome != AgentOutcome.ANSWERED:
            failures[name] = answer
        elif (key := fingerprint(answer.kernel)) in {*tried, *valid.values()}:
            failures[name] = TWIN
        else:
            valid[name] = key
    return valid, failures


def check_untouched(workspace: Workspace, records: RecordStore) -> None:
    """UsageError where the user's work would be overwritten: an edit of kernel.py, or a plan of the next version."""
    best, plan = records.best(), workspace.plan(records.next_version())
    if not workspace.kernel.is_file() or digest(workspace.kernel) != best.kernel_sha256:
        raise UsageError(
            f"kernel.py is not the accepted {best.version}; let run_gate.py judge it, or put it back: "
            f"git -C {workspace.root} checkout -- kernel.py"
        )
    if plan.exists():
        raise UsageError(f"{plan} is the plan of a version that was not judged; judge it or move it away")


def recorded_kernels(workspace: Workspace, records: RecordStore) -> Iterator[str]:
    """The texts of all recorded kernels that still exist, masked ones too."""
    for record in records.records(masked=True):
        with contextlib.suppress(UsageError):
            yield version_kernels.kernel_of(workspace, record).decode(errors="replace")
