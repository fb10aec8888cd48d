"""The loop's own files, in W/.loop: state.json, where it stands; rounds.jsonl, what each round came to; status.json, what it does now;
candidates/, kernels and plans that wait for their verdict. An agent that was at them changes nothing: they are written whole each time.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .. import bundle
from ..errors import UsageError
from ..session import plans, record_store
from . import snapshot

LONGEST = 500  # characters of a message


@dataclass
class State:
    """Where the loop stands.

    candidates: of the round in which agents work, each with the digest of its files once they are right. waiting: those that are to
    be judged, the first of them as `version` while its verdict is recorded. tried: fingerprints of all kernels that were judged, in
    earlier runs too. kept: while agents or measurements run, the digest of what is kept of the workspace.
    """

    candidates: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    version: str | None = None
    gained: bool = False
    rounds: int = 0
    agent_calls: int = 0
    without_gain: int = 0
    restarts: int = 0
    spent_s: float = 0.0
    tried: list[str] = field(default_factory=list)
    kept: str | None = None

    def distrusted(self) -> "State":
        """No answer counts: somebody has changed the workspace while agents worked."""
        return replace(self, candidates=dict.fromkeys(self.candidates, ""))


class Ledger:
    """The files of one workspace's loop."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._noted = ""  # all of rounds.jsonl

    def open(self) -> None:
        """Its folders are folders, whatever an agent has put there, git does not see them, and earlier rounds are known."""
        for folder in (self.folder, self.folder / "candidates"):
            snapshot.real_folder(folder)
        bundle.write_text(self.folder / ".gitignore", "*\n")
        path = self._cleared(self.folder / "rounds.jsonl")
        self._noted = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def state_file(self) -> Path:
        return self.folder / "state.json"

    def save(self, state: State) -> None:
        bundle.write_json(self._cleared(self.state_file), asdict(state))

    def state(self) -> State | None:
        """Where a run that did not end stands; None where there is none. UsageError when the file holds something else."""
        if not self.state_file.exists():
            return None
        try:
            state = State(**bundle.read_json(self.state_file))
            lists = isinstance(state.waiting, list) and isinstance(state.tried, list)
            texts = lists and all(
                isinstance(x, str) for x in [*state.waiting, *state.tried, *state.candidates.values()]
            )
            texts = texts and isinstance(state.version, str | None) and isinstance(state.kept, str | None)
            numbers = (state.rounds, state.agent_calls, state.without_gain, state.restarts, state.spent_s)
            if texts and all(isinstance(number, int | float) for number in numbers):
                return state
        except (AttributeError, TypeError, OSError, RecursionError):
            pass
        raise UsageError(f"{self.state_file} is no state of a run; remove it to begin anew")

    def distrust(self) -> None:
        """State.distrusted, on disk."""
        if state := self.state():
            self.save(state.distrusted())

    def forget(self) -> None:
        """Put the state away, so that the next run begins afresh."""
        self.state_file.unlink(missing_ok=True)

    # --- rounds and progress ----------------------------------------------------------------------------------

    def note(self, number: int, of: str | None, outcome: str, message: str) -> str:
        """A line of rounds.jsonl; the message as it stands there. of: a version, or a candidate that became none."""
        message = plans.in_a_line(message)[:LONGEST]
        line = {"at": record_store.now(), "round": number, "of": of, "outcome": outcome, "message": message}
        half_a_line = bool(self._noted) and not self._noted.endswith("\n")
        self._noted += "\n" * half_a_line + json.dumps(line) + "\n"
        bundle.write_text(self._cleared(self.folder / "rounds.jsonl"), self._noted)
        return message

    def last_noted(self) -> str | None:
        """What the last line of rounds.jsonl is of."""
        try:
            return json.loads(self._noted.splitlines()[-1])["of"] if self._noted else None
        except (ValueError, KeyError, TypeError):
            return None

    def tell(self, status: dict) -> None:
        """status.json, for whoever wants to know."""
        bundle.write_json(self._cleared(self.folder / "status.json"), status)

    # --- candidates -------------------------------------------------------------------------------------------

    def candidate(self, name: str) -> tuple[Path, Path]:
        """The files of a candidate's kernel and plan."""
        return self.folder / "candidates" / f"{name}.py", self.folder / "candidates" / f"{name}.md"

    def put_down(self, name: str, kernel: str, plan: str) -> tuple[Path, Path]:
        """A candidate as files of the loop's own, which no agent's desk takes away."""
        paths = self.candidate(name)
        for path, text in zip(paths, (kernel, plan), strict=True):
            bundle.write_text(self._cleared(path), text)
        return paths

    def read_if(self, name: str, digest: str) -> tuple[str, str] | None:
        """Kernel and plan of a candidate, if they have this digest; else None."""
        try:
            kernel, plan = (bundle.read_bytes(path).decode("utf-8") for path in self.candidate(name))
        except (UsageError, OSError, UnicodeDecodeError):
            return None
        return (kernel, plan) if candidate_digest(kernel, plan) == digest else None

    def _cleared(self, path: Path) -> Path:
        """A file of the loop's own; what an agent may have put in its place, or in its folders', is removed."""
        for folder in (self.folder, path.parent):
            snapshot.real_folder(folder)
        snapshot.remove_unless_file(path)
        return path


def candidate_digest(kernel: str, plan: str) -> str:
    """SHA-256 of a candidate, in hexadecimal."""
    return hashlib.sha256(f"{kernel}\0{plan}".encode("utf-8", "replace")).hexdigest()
