"""The progress of a run: its state, on disk before each step; its log and status; the guard of the workspace."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from ..errors import ToolError, UsageError
from ..session import record_store
from ..session.record import Record
from ..session.workspace import Workspace
from . import agent_sandbox
from .run_files import RunFiles
from .run_state import State
from .snapshot import Snapshot, discard
from .stopping import Limits


class Progress:
    """The state of a run. Several threads may change it."""

    def __init__(self, workspace: Workspace, limits: Limits, say: Callable[[str], None]):
        self.workspace, self.limits, self.say = workspace, limits, say
        self.files = RunFiles(workspace.root / ".loop")
        self.records = record_store.RecordStore(workspace)
        self.state = State()
        self.last_word: str | None = None  # of status.json, once the run is about to end
        self.lock = threading.RLock()
        self._best: Record | None = None  # as it was last read
        self._start = time.monotonic()  # of the run; earlier when a killed one is resumed

    def refuse_unfinished(self) -> None:
        """UsageError when a former run did not end."""
        if self.files.state_file.exists():
            raise UsageError(f"{self.files.state_file} is of a run that did not end; go on with --resume, or remove it")

    def recover(self) -> State | None:
        """Remove the rest of a killed run and undo changes since. Return the state to continue from."""
        unfinished = self.files.state()
        self.files.open()
        agent_sandbox.clear_killed_run(self.workspace)
        before = Snapshot.load(self.workspace.root, unfinished.kept if unfinished else None)
        if before and (changed := before.restore(self.files.distrust)):
            self.say(
                "changed since the run was killed or while agents worked, and put back: "
                f"{', '.join(changed[:5])}; the changed files are in {self.files.folder / 'taken'}"
            )
        if unfinished:  # saved before the snapshot is removed: a run that is killed in between would miss it
            unfinished = self.files.state().with_snapshot(None)
            self.files.save_state(unfinished)
        discard(self.workspace.root)
        return unfinished

    def start(self, unfinished: State | None) -> None:
        self.state = unfinished or State()
        self._start = time.monotonic() - self.state.spent_s

    def spent_s(self) -> float:
        """Seconds that the run has taken, over all its processes."""
        return time.monotonic() - self._start

    def apply(self, transition: Callable[..., State], *arguments) -> None:
        """Go to the next state: apply(State.candidate_valid, name, digest). It is saved before this returns."""
        with self.lock:
            self.state = transition(self.state, *arguments)
            self.save()

    def save(self) -> None:
        with self.lock:
            self.state = self.state.with_time(self.spent_s())
            self.files.save_state(self.state)
            self.write_status()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[list[str]]:
        """Undo at the end what others changed in the workspace. Yield a list that then names the changes."""
        changed: list[str] = []
        before = Snapshot.take(self.workspace)
        self.apply(State.with_snapshot, before.digest)
        try:
            yield changed
        finally:
            changed += before.restore(lambda: self.apply(State.distrusted))
            self.apply(State.with_snapshot, None)
            discard(self.workspace.root)

    def log(self, outcome: str, of: str | None, message: str, number: int | None = None) -> None:
        """A line in rounds.jsonl and on stderr. of: a version or a candidate. number: of the round, if not this one."""
        with self.lock:
            message = self.files.log(self.state.rounds if number is None else number, of, outcome, message)
        self.say(f"{of or 'loop'}: {outcome}: {message[:200]}")

    def write_status(self) -> None:
        """status.json."""
        with contextlib.suppress(ToolError):  # an agent has changed the records; they are restored after it
            self._best = self.records.best() or self._best
        best = self._best
        self.files.write_status(
            {
                "now": self.last_word or activity(self.state),
                "at": record_store.now(),
                "pid": os.getpid(),
                "best": best.version,
                "best_latency_us": best.latency_us,
                "rounds": self.state.rounds,
                "rounds_left": max(0, self.limits.rounds - self.state.rounds),
                "minutes_left": max(0.0, self.limits.minutes - self.state.spent_s / 60),
                "agent_calls": self.state.agent_calls,
            },
        )


def activity(state: State) -> str:
    """The activity of a run in this state. Pure."""
    if state.waiting:
        return f"round {state.rounds}: judging {', '.join(state.waiting)}"
    return f"round {state.rounds}: asking the agent" if state.rounds else "beginning"
