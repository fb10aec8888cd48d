"""The files of a run in W/.loop, which agents may have been at: each is written whole, over whatever lies there.

| file | holds |
|---|---|
| state.json | where the run stands (run_state.State) |
| rounds.jsonl | the outcome of each candidate, a line each |
| status.json | what the run does now, for people |
| candidates/ | kernels and plans that wait for their verdict |
| kept.tar | the workspace's snapshot, while agents or measurements run (snapshot.py) |
| taken/ | what was changed in the workspace meanwhile |
"""

import hashlib
import json
from pathlib import Path

from .. import bundle
from ..errors import UsageError
from ..session import plans, record_store
from . import file_trees, run_state
from .run_state import State

LONGEST = 500  # characters of a message


class RunFiles:
    """The files of one workspace's run. folder: W/.loop."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.state_file = folder / "state.json"
        self._log = ""  # the text of rounds.jsonl

    def open(self) -> None:
        """Make the folders, hide them from git, read the log of earlier runs."""
        for folder in (self.folder, self.folder / "candidates"):
            file_trees.ensure_folder(folder)
        bundle.write_text(self.folder / ".gitignore", "*\n")
        path = self._cleared(self.folder / "rounds.jsonl")
        self._log = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    # --- state ------------------------------------------------------------------------------------------------

    def save_state(self, state: State) -> None:
        bundle.write_json(self._cleared(self.state_file), run_state.to_json(state))

    def state(self) -> State | None:
        """The state of a run that did not end; None without one. UsageError when the file holds something else."""
        if not self.state_file.exists():
            return None
        try:
            state = run_state.from_json(bundle.read_json(self.state_file))
        except (OSError, RecursionError):
            state = None
        if state is None:
            raise UsageError(f"{self.state_file} is no state of a run; remove it to start from the beginning")
        return state

    def distrust(self) -> None:
        """State.distrusted, on disk."""
        if state := self.state():
            self.save_state(state.distrusted())

    def remove_state(self) -> None:
        """Remove the state, so that the next run starts from the beginning."""
        self.state_file.unlink(missing_ok=True)

    # --- log and status ---------------------------------------------------------------------------------------

    def log(self, number: int, of: str | None, outcome: str, message: str) -> str:
        """Add a line to rounds.jsonl. Returns the message as it stands there.

        number: of the round. of: a version, or a candidate that became none.
        """
        message = plans.in_a_line(message)[:LONGEST]
        line = {"at": record_store.now(), "round": number, "of": of, "outcome": outcome, "message": message}
        half_a_line = bool(self._log) and not self._log.endswith("\n")
        self._log += "\n" * half_a_line + json.dumps(line) + "\n"
        bundle.write_text(self._cleared(self.folder / "rounds.jsonl"), self._log)
        return message

    def last_logged(self) -> str | None:
        """The version or candidate of the last line of rounds.jsonl."""
        try:
            return json.loads(self._log.splitlines()[-1])["of"] if self._log else None
        except (ValueError, KeyError, TypeError):
            return None

    def write_status(self, status: dict) -> None:
        bundle.write_json(self._cleared(self.folder / "status.json"), status)

    # --- candidates -------------------------------------------------------------------------------------------

    def candidate(self, name: str) -> tuple[Path, Path]:
        """The files of a candidate's kernel and plan."""
        return self.folder / "candidates" / f"{name}.py", self.folder / "candidates" / f"{name}.md"

    def has_candidate(self, name: str) -> bool:
        return all(path.is_file() for path in self.candidate(name))

    def write_candidate(self, name: str, kernel: str, plan: str) -> tuple[Path, Path]:
        """Write a candidate's files; their paths."""
        paths = self.candidate(name)
        for path, text in zip(paths, (kernel, plan), strict=True):
            bundle.write_text(self._cleared(path), text)
        return paths

    def read_candidate(self, name: str, digest: str) -> tuple[str, str] | None:
        """Kernel and plan of a candidate; None unless they have this digest."""
        try:
            kernel, plan = (bundle.read_bytes(path).decode("utf-8") for path in self.candidate(name))
        except (UsageError, OSError, UnicodeDecodeError):
            return None
        return (kernel, plan) if candidate_digest(kernel, plan) == digest else None

    def _cleared(self, path: Path) -> Path:
        """`path`, after anything but a plain file has been removed there, and anything but folders above it."""
        for folder in (self.folder, path.parent):
            file_trees.ensure_folder(folder)
        file_trees.remove_unless_file(path)
        return path


def candidate_digest(kernel: str, plan: str) -> str:
    """SHA-256 of a candidate, in hexadecimal."""
    return hashlib.sha256(f"{kernel}\0{plan}".encode("utf-8", "replace")).hexdigest()
