"""An agent's command, run on a brief in a git worktree of its own: what it answered, and what it did besides.

Whatever the command does has a name (OUTCOMES); nothing of it is taken but kernel.py and the plan. It runs with the user's
rights, as every coding agent does; what it changes in the workspace itself is found and named.
"""

import ast
import hashlib
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from . import bundle
from .sandbox import Pump, Tail, kill_group
from .workspace import Workspace, environment_without_git, run_git

PLAN = "plan.md"
OUTCOMES = ("answered", "timed out", "failed", "no answer", "no plan", "unchanged", "tried before", "forbidden files")


@dataclass(frozen=True)
class Answer:
    """outcome: one of OUTCOMES. message: why, in a sentence. kernel, plan: the texts, of an answer."""

    outcome: str
    message: str
    kernel: str | None = None
    plan: str | None = None
    wall_s: float = 0.0


class Desk:
    """The worktree in which an agent works on one candidate, which it may leave as kernel.py and plan.md.

    kernel: what kernel.py holds when it begins.
    """

    def __init__(self, workspace: Workspace, name: str, kernel: bytes):
        self.workspace, self.name, self.kernel = workspace, name, kernel
        self.path = workspace.root / ".loop" / "desks" / name

    def __enter__(self) -> "Desk":
        self.remove()
        self.base = self.workspace.git("rev-parse", "HEAD")
        self.workspace.git("worktree", "add", "--quiet", "--detach", str(self.path), self.base)
        bundle.write_bytes(self.path / "kernel.py", self.kernel)
        return self

    def __exit__(self, *_) -> None:
        self.remove()

    def remove(self) -> None:
        run_git(self.workspace.root, "worktree", "remove", "--force", str(self.path))
        run_git(self.workspace.root, "worktree", "prune")

    def ask(self, command: str, brief: str, timeout_s: float, tried: set[str]) -> Answer:
        """The agent's answer to a brief. tried: fingerprints of kernels that were judged already."""
        before = Kept(self.workspace)
        code, log, wall_s = run(command, brief, self.path, timeout_s)
        outcome, message = self._judged(code, log, timeout_s, before.put_back(), tried)
        kernel, plan = (self._text(name) for name in ("kernel.py", PLAN))
        return Answer(outcome, message, kernel, plan, wall_s)

    def _judged(
        self, code: int | None, log: str, timeout_s: float, meddled: list[str], tried: set[str]
    ) -> tuple[str, str]:
        """(outcome, message); the first that holds. meddled: what was changed in the workspace itself."""
        if changed := sorted(name for name in self.touched() if name not in ("kernel.py", PLAN)):
            return "forbidden files", f"it touched {', '.join(changed[:5])}; only kernel.py and {PLAN} are its own"
        if meddled:
            return "forbidden files", f"it changed {', '.join(meddled[:5])} in the workspace itself; that is put back"
        if code is None:
            return "timed out", f"no answer within {timeout_s:.0f} s"
        if code:
            return "failed", f"exit code {code}: {log.strip().splitlines()[-1] if log.strip() else 'it said nothing'}"
        kernel = self._text("kernel.py")
        if not kernel or not kernel.strip():
            return "no answer", "it left no kernel.py"
        if fingerprint(kernel) == fingerprint(self.kernel.decode()):
            return "unchanged", "kernel.py is what it was, but for comments and layout"
        if fingerprint(kernel) in tried:
            return "tried before", "this kernel was judged already, but for comments and layout"
        if not self._text(PLAN):
            return "no plan", f"it left no {PLAN}"
        return "answered", "a kernel and a plan"

    def touched(self) -> set[str]:
        """Files that differ from the commit it began with, committed or not, new ones too."""
        changed = run_git(self.path, "diff", "--name-only", "-z", self.base).stdout
        new = run_git(self.path, "ls-files", "--others", "--exclude-standard", "-z").stdout
        return {name for name in (changed + new).decode(errors="replace").split("\0") if name}

    def _text(self, name: str) -> str | None:
        path = self.path / name
        if path.is_symlink() or not path.is_file():
            return None
        return path.read_text(encoding="utf-8", errors="replace")


def clear_desks(workspace: Workspace) -> None:
    """Remove what a killed run left."""
    shutil.rmtree(workspace.root / ".loop" / "desks", ignore_errors=True)
    run_git(workspace.root, "worktree", "prune")


class Kept:
    """The workspace's commit and the files of the session, as they were before an agent worked."""

    def __init__(self, workspace: Workspace):
        self.workspace = workspace
        self._head = workspace.git("rev-parse", "HEAD")
        self._files = {path: path.read_bytes() for path in self._paths()}

    def _paths(self) -> list[Path]:
        files = [self.workspace.readme, self.workspace.kernel, self.workspace.reference]
        for folder in ("memory", "plans", "rejected"):
            files += sorted(path for path in (self.workspace.root / folder).rglob("*") if path.is_file())
        return files

    def put_back(self) -> list[str]:
        """Restore what was changed or removed; what is new goes to .loop/taken. Returns what that was."""
        meddled = []
        if self.workspace.git("rev-parse", "HEAD") != self._head:
            self.workspace.git("reset", "--quiet", "--soft", self._head)
            meddled.append("the history (HEAD)")
        for path, content in self._files.items():
            if not path.is_file() or path.read_bytes() != content:
                bundle.write_bytes(path, content)
                meddled.append(str(path.relative_to(self.workspace.root)))
        for path in self._paths():
            if path not in self._files:
                name = str(path.relative_to(self.workspace.root))
                taken = self.workspace.root / ".loop" / "taken" / name
                taken.parent.mkdir(parents=True, exist_ok=True)
                path.replace(taken)
                meddled.append(name)
        return meddled


def run(command: str, brief: str, folder: Path, timeout_s: float) -> tuple[int | None, str, float]:
    """(exit code or None after a time-out, end of what it said, seconds) of a shell command with the brief on stdin."""
    start = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment_without_git(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    log = Pump(process.stdout, Tail())
    feeder = Pump.feeding(process.stdin, brief.encode())
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_group(process)
    feeder.join(Pump.GRACE_S)
    log.finish()
    return code, log.reader.text(), time.monotonic() - start


def fingerprint(kernel: str) -> str:
    """The same for two kernels that differ in comments, docstrings and layout alone; of text that is no Python, of the
    text."""
    try:
        tree = ast.parse(kernel)
    except (SyntaxError, ValueError):
        return hashlib.sha256(kernel.strip().encode()).hexdigest()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
