"""A round's first half: ask agents side by side, and hand each answer back until it is valid."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ..errors import EnvironmentLacks, ToolError, UsageError
from ..measure.pairing import Comparison
from ..session import version_kernels
from ..statuses import AgentOutcome, Status
from . import agent_process, clients, executors, run_files
from .agent_sandbox import AgentSandbox, Answer, run_mark
from .fingerprints import fingerprint
from .progress import Progress
from .run_state import State
from .stopping import Limits

DAMAGE = (NotADirectoryError, FileNotFoundError, FileExistsError, IsADirectoryError, PermissionError)
REFINE = """

## {file} is not right yet

{message}

Mend {file} in this folder, and leave both kernel.py and plan.md there.
"""


class Steps(Protocol):
    """The steps of a round besides its executor; see gpu_steps.GpuSteps."""

    def brief(self, version: str, number: int) -> str: ...
    def check(self, kernel: Path, plan: Path) -> tuple[str, str]: ...
    def restart(self) -> str | None: ...
    def final(self) -> dict[str, Comparison]: ...


class Agents:
    """command: the agent's, in bash. wrapper: put before it, see agent_process.read_only. stop: ends verifications.
    client: whose command it is, if a known one's."""

    def __init__(
        self,
        command: str,
        wrapper: tuple[str, ...],
        limits: Limits,
        steps: Steps,
        stop: Callable[[], None],
        progress: Progress,
        client: clients.Client | None = None,
    ):
        self.command, self.wrapper, self.limits, self.steps, self.progress = command, wrapper, limits, steps, progress
        self.client, self._stop_verifications = client, stop
        self._stopping = threading.Event()

    def ask_all(self, starts: dict[str, str]) -> dict[str, Answer]:
        """The answers of one round. starts: {name of a candidate: version that it starts from}."""
        workspace, best = self.progress.workspace, self.progress.records.best().version
        kernels = {name: self._kernel_of(version) for name, version in starts.items()}
        versions = [version if kernels[name] else best for name, version in starts.items()]
        briefs = [self.steps.brief(version, number) for number, version in enumerate(versions)]
        with contextlib.ExitStack() as stack:
            sandboxes = [
                stack.enter_context(
                    AgentSandbox(workspace, name, kernel or workspace.kernel.read_bytes(), self.wrapper)
                )
                for name, kernel in kernels.items()
            ]
            with self.progress.guarded() as changed:
                calls = list(zip(sandboxes, briefs, strict=True))
                answers = executors.side_by_side(self.answer_or_failure, calls, len(calls), self.stop)
        if changed:
            answers = [forbidden(changed)] * len(answers)
        return dict(zip(starts, answers, strict=True))

    def _kernel_of(self, version: str) -> bytes | None:
        """The kernel of a version; None when somebody has cleared rejected/."""
        try:
            return version_kernels.kernel_of(self.progress.workspace, self.progress.records.read(version))
        except UsageError:
            return None

    def stop(self) -> None:
        """End agents and verifications; no other begins."""
        self._stopping.set()
        agent_process.end_marked(run_mark(self.progress.workspace))
        self._stop_verifications()

    def answer_or_failure(self, sandbox: AgentSandbox, brief: str) -> Answer:
        """`refine_until_valid`; "failed" when an agent has damaged the files that it needs; they are restored later."""
        try:
            return self.refine_until_valid(sandbox, brief)
        except EnvironmentLacks:
            raise
        except (ToolError, *DAMAGE) as error:
            return Answer(AgentOutcome.FAILED, f"its answer could not be read: {error}")

    def refine_until_valid(self, sandbox: AgentSandbox, brief: str) -> Answer:
        """The agent's answer, handed back with the verifier's message until it is valid or no refinement is left."""
        tried = set(self.progress.state.tried)
        answer = Answer(AgentOutcome.NO_CALL_LEFT, "the calls of the agent were used up")
        for refinements_left in reversed(range(1 + self.limits.refinements)):
            if not self._count_call(sandbox.name):
                return answer
            answer = self.call_agent(sandbox, brief, tried)
            if answer.outcome != AgentOutcome.ANSWERED:
                return answer
            files = self.progress.files.write_candidate(sandbox.name, answer.kernel, answer.plan)
            status, message = self.steps.check(*files)
            if status == Status.OK:
                digest = run_files.candidate_digest(answer.kernel, answer.plan)
                self.progress.apply(State.candidate_valid, sandbox.name, digest)
                return answer
            if not refinements_left:
                is_refused = status == Status.PLAN
                return replace(answer, outcome=AgentOutcome.REFUSED_PLAN, message=message) if is_refused else answer
            self.progress.log("refined", sandbox.name, message)
            if status not in (Status.PLAN, Status.CRASH):  # the kernel itself is wrong: it may not come back unchanged
                tried.add(fingerprint(answer.kernel))
            brief += REFINE.format(message=message, file="plan.md" if status == Status.PLAN else "kernel.py")
        return answer

    def _count_call(self, name: str) -> bool:
        """Count a call of the agent, if one is left. Return whether it may be called."""
        with self.progress.lock:
            calls = self.progress.state.agent_calls
            if self._stopping.is_set() or calls >= self.limits.agent_calls:
                return False
            self.progress.say(f"{name}: asking the agent, call {calls + 1}")
            self.progress.apply(State.call_counted)
            return True

    def call_agent(self, sandbox: AgentSandbox, brief: str, tried: set[str]) -> Answer:
        """AgentSandbox.ask within the time that is left. A command that does not exist is not counted as a call, nor is
        a client that cannot ask its model."""
        seconds_left = 60 * self.limits.minutes - self.progress.spent_s()
        try:
            timeout_s = max(1.0, min(self.limits.agent_timeout_s, seconds_left))
            watch = self.client and clients.Watch(self.client, self.progress.say)
            return sandbox.ask(self.command, brief, timeout_s, tried, watch)
        except EnvironmentLacks:
            self.progress.apply(State.call_uncounted)
            raise


def forbidden(changed: list[str]) -> Answer:
    """The answer of each agent of a round in which the workspace was changed. The agent that changed it is unknown."""
    return Answer(
        AgentOutcome.FORBIDDEN_FILES,
        f"{', '.join(changed[:5])} in the workspace itself was changed in this round; that is put back",
    )
