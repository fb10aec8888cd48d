"""A git clone outside the workspace, in which one agent works on one candidate.

AgentOutcome names everything that an agent can do. Only kernel.py and the plan are taken from the clone.
"""

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..errors import EnvironmentLacks, UsageError
from ..session import record_store
from ..session.creation import IGNORED
from ..session.git_commands import run_git, start_git
from ..session.workspace import Workspace
from ..statuses import AgentOutcome
from . import agent_process, clients, file_trees, snapshot
from .fingerprints import fingerprint

PLAN = "plan.md"
MOST_BYTES = {"kernel.py": 1 << 20, PLAN: 1 << 16}
OF_A_REFUSAL = (AgentOutcome.NO_ANSWER, AgentOutcome.NO_PLAN, AgentOutcome.UNCHANGED)  # by the client itself
NO_COMMAND = re.compile(r"bash: line 1: [^\n]*: (command not found|Permission denied|No such file or directory)")
IGNORED_NAMES = (".git", *(name.rstrip("/") for name in IGNORED))
HALF_WRITTEN = [  # by bundle.write_bytes when it was killed; editors name their temporary files otherwise
    f"{place}.????????"
    for place in (
        ".kernel.py",
        "plans/.v*_plan.md",
        "rejected/.v*_kernel*.py",
        ".loop/.*.json*",
        ".loop/.kept.tar",
        ".loop/..gitignore",
        ".loop/candidates/.*",
    )
]


@dataclass(frozen=True)
class Answer:
    """message: the reason, a sentence. kernel, plan: their texts, if the agent left them."""

    outcome: AgentOutcome
    message: str
    kernel: str | None = None
    plan: str | None = None
    wall_s: float = 0.0


class AgentSandbox:
    """The clone in which an agent works on one candidate, and a folder for its temporary files, as a context manager:
    both are removed at the end.

    The clone's own git has one commit, of the best version, so that its history shows no masked rounds. kernel: what
    kernel.py holds at the start. wrapper: of the agent's command, see agent_process.read_only.
    """

    def __init__(self, workspace: Workspace, name: str, kernel: bytes, wrapper: tuple[str, ...] = ()):
        self.workspace, self.name, self.kernel, self.wrapper = workspace, name, kernel, wrapper
        self.path = run_folder(workspace) / name
        self.temporary = self.path.with_name(f"{name}.tmp")
        self.mark = f"{run_mark(workspace)}/{name}"

    def __enter__(self) -> "AgentSandbox":
        self.remove()
        file_trees.ensure_folder(self.path.parent)
        file_trees.ensure_folder(self.temporary)
        options = ("--quiet", "--no-local", "--depth", "1", "--template=")
        self.workspace.git("clone", *options, str(self.workspace.root), str(self.path))
        for version in record_store.RecordStore(self.workspace).masked_versions():
            (self.path / "plans" / f"{version}_plan.md").unlink(missing_ok=True)
        self._forget_history()
        bundle.write_bytes(self.path / "kernel.py", self.kernel)
        self.before = file_trees.entries(self.path, IGNORED_NAMES)
        return self

    def _forget_history(self) -> None:
        """Replace the clone's git, which still has the plans of masked rounds, by a git with one commit."""
        file_trees.remove(self.path / ".git")
        start_git(self.path, "--template=")
        run_git(self.path, "add", "--all")
        run_git(self.path, "commit", "--quiet", "--message", "The best version")

    def __exit__(self, *_) -> None:
        self.remove()
        with contextlib.suppress(OSError):  # another agent's clone is still there
            self.path.parent.rmdir()

    def remove(self) -> None:
        agent_process.end_marked(self.mark)
        file_trees.remove(self.path)
        file_trees.remove(self.temporary)

    def ask(
        self, command: str, brief: str, timeout_s: float, tried: set[str], watch: clients.Watch | None = None
    ) -> Answer:
        """The agent's answer to a brief.

        tried: fingerprints of kernels that were judged already. watch: of a known client. EnvironmentLacks when the
        command does not exist, and when the client ended without an answer of its model.
        """
        ends = watch.line if watch else lambda _: False
        code, log, wall_s = agent_process.run(
            command, brief, self.path, timeout_s, self.mark, self.wrapper, ends, TMPDIR=str(self.temporary)
        )
        if code in (126, 127) and NO_COMMAND.fullmatch(log.strip()):
            raise EnvironmentLacks(
                f"the agent's command cannot be run: {log.strip()}; go on with --resume and another --agent"
            )
        if code != 0 and watch and watch.trouble:
            raise EnvironmentLacks(f"{watch.trouble.describe()}; {watch.trouble.kind.mend}, then go on with --resume")
        texts = {name: self._text(name) for name in MOST_BYTES}  # read once: what is judged is what is taken
        original = self.kernel.decode(errors="replace")
        outcome, message = (
            ended(code, log, timeout_s) or forbidden(self.touched()) or classified(texts, original, tried)
        )
        if watch and not watch.answered and outcome == AgentOutcome.TIMED_OUT:
            message += "; its model answered nothing: look at the network and at the service"
        if watch and watch.refused and outcome in OF_A_REFUSAL:
            message += f"; the client did not allow it: {watch.refused[-1]}"
        return Answer(outcome, message, texts["kernel.py"], texts[PLAN], wall_s)

    def touched(self) -> list[str]:
        """The names of files that are new or changed, except kernel.py and the plan. New folders do not count, only
        what is in them: an agent's sandbox may leave empty ones, on which it had mounted something."""
        now = file_trees.entries(self.path, IGNORED_NAMES)
        changed = {name for name in {*now, *self.before} if now.get(name) != self.before.get(name)}
        new_folders = {name for name in changed if name not in self.before and now[name] == file_trees.FOLDER}
        return sorted(changed - new_folders - {"kernel.py", PLAN})

    def _text(self, name: str) -> str | None:
        """A file's text, cut a little beyond its largest size; None when it is no plain file."""
        try:
            handle = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            return None
        with open(handle, "rb") as file:
            return file.read(MOST_BYTES[name] + 8).decode("utf-8", errors="replace")


def ended(code: int | None, log: str, timeout_s: float) -> tuple[AgentOutcome, str] | None:
    """(outcome, message) of a command that failed, or None after exit code 0. Pure."""
    if code is None:
        return AgentOutcome.TIMED_OUT, f"no answer within {timeout_s:.0f} s"
    if code:
        return AgentOutcome.FAILED, f"exit code {code}: {clients.readable(log) or 'it printed nothing'}"
    return None


def forbidden(touched: list[str]) -> tuple[AgentOutcome, str] | None:
    """(outcome, message) when an agent touched files that it may not write, or None. Pure."""
    if not touched:
        return None
    return AgentOutcome.FORBIDDEN_FILES, f"it touched {', '.join(touched[:5])}; it may only write kernel.py and {PLAN}"


def classified(texts: dict[str, str | None], original: str, tried: set[str]) -> tuple[AgentOutcome, str]:
    """(outcome, message) for the texts that an agent left, by the first rule that applies. Pure.

    original: the kernel.py that the agent got. tried: fingerprints of kernels that were judged already.
    """
    for name, most in MOST_BYTES.items():
        if texts[name] is not None and len(texts[name].encode()) > most:
            return AgentOutcome.TOO_LARGE, f"{name} is larger than {most >> 10} KB"
    kernel = texts["kernel.py"]
    if not kernel or not kernel.strip():
        return AgentOutcome.NO_ANSWER, "it left no kernel.py"
    key = fingerprint(kernel)
    if key == fingerprint(original):
        return AgentOutcome.UNCHANGED, "kernel.py is what it was, but for comments and layout"
    if key in tried:
        return AgentOutcome.TRIED_BEFORE, "this kernel was tried already, but for comments and layout"
    if not texts[PLAN]:
        return AgentOutcome.NO_PLAN, f"it left no {PLAN}"
    return AgentOutcome.ANSWERED, "a kernel and a plan"


def run_folder(workspace: Workspace) -> Path:
    """The folder of this workspace's agents, in the folder for temporary files.

    Its name depends on the workspace alone, so that a resumed run removes what a killed one left. UsageError when the
    folder for temporary files is in the workspace; EnvironmentLacks when another user can use it.
    """
    temporary = Path(tempfile.gettempdir()).resolve()
    if temporary.is_relative_to(workspace.root):
        raise UsageError(f"TMPDIR is {temporary}, which is in the workspace; set it to a folder outside")
    digest = hashlib.sha256(os.fsencode(workspace.root)).hexdigest()[:16]
    return bundle.private_folder(temporary / f"kernelopt-agents-{os.geteuid()}") / digest


def run_mark(workspace: Workspace) -> str:
    """The start of the mark of each agent of this workspace; see agent_process.end_marked."""
    return f"{workspace.root}/.loop"


def clear_killed_run(workspace: Workspace) -> None:
    """End and remove what a killed run left: agents, their clones, locks of its git commands, half-written files."""
    agent_process.end_marked(run_mark(workspace))
    file_trees.remove(run_folder(workspace))
    snapshot.unlock_git(workspace.root)
    for pattern in HALF_WRITTEN:
        for half_written in workspace.root.glob(pattern):
            half_written.unlink()
