"""One optimisation session on disk: its files, its Task block and its git history."""

import contextlib
import fcntl
import os
from pathlib import Path

from .. import bundle
from ..errors import EnvironmentLacks, UsageError
from . import delivery
from .git_commands import run_git
from .readme import TASK_BLOCK, parse_task, replace_section
from .task import Task

KEPT_FILE = ".loop/kept.tar"  # exists while agents work (loop/snapshot.py)


class Workspace:
    """The folder of one session. `Workspace(path)` refuses a folder that is not a workspace."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))  # Path.resolve fails where a link leads to itself
        self.readme = self.root / "README.md"
        self.kernel = self.root / "kernel.py"
        self.reference = self.root / "reference.py"
        self.cache = self.root / ".cache"
        self.memory = self.root / "memory"
        lost = [path.name for path in (self.readme, self.reference) if not path.is_file()]
        if lost and self.memory.is_dir():
            raise UsageError(f"{self.root} lacks {lost[0]}; take it back: git -C {self.root} checkout -- {lost[0]}")
        if lost:
            raise UsageError(f"{self.root} is no workspace; make one: bash reference/workspace_init.sh NAME KERNEL")

    def plan(self, version: str) -> Path:
        return self.root / "plans" / f"{version}_plan.md"

    def profile(self, version: str, mode: str) -> Path:
        return self.root / "profiles" / version / mode

    @contextlib.contextmanager
    def locked(self):
        """Let only one gate at a time work on a workspace. The second one gets EnvironmentLacks."""
        if not (self.root / ".git").is_dir():
            raise UsageError(f"{self.root} has no history (.git), so nothing can be judged there; make a new workspace")
        with bundle.lock_file(self.root / ".git" / "kernelopt-lock") as handle:  # not in a folder that people clear
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EnvironmentLacks(f"{self.root} is in use by another gate; wait for it to end") from None
            delivery.finish(self.root)
            yield

    # --- the README -----------------------------------------------------------------------------------------

    def task(self) -> Task:
        """Return the Task block, checked against its schema."""
        return parse_task(self.readme.read_bytes(), str(self.readme))

    def task_at(self, revision: str) -> Task:
        """Return the Task block at a revision."""
        return parse_task(self.file_at(revision, "README.md"), f"README.md of {revision[:12]}")

    def update_readme(self, task: Task, sections: dict[str, str]) -> None:
        """Replace the Task block and the text of the named sections. Other text does not change."""
        block = task.to_json()
        bundle.validate(block, "task.schema.json", "Task block")
        text = self.readme.read_text(encoding="utf-8")
        match = TASK_BLOCK.search(text)
        text = text[: match.start(1)] + bundle.dumps(block) + text[match.end(1) :]
        for title, body in sections.items():
            text = replace_section(text, title, body)
        bundle.write_text(self.readme, text)

    # --- git ------------------------------------------------------------------------------------------------

    def git(self, *arguments: str) -> str:
        """Return the output of a git command in the workspace. Raise UsageError if git fails."""
        done = run_git(self.root, *arguments)
        if done.returncode:
            raise UsageError(f"git {arguments[0]} failed in {self.root}: {done.stderr.decode().strip()}")
        return done.stdout.decode().strip()

    def commit(self, message: str) -> str:
        """Commit all files that git does not ignore. Return the full hash of the new commit."""
        self.git("read-tree", "--empty")  # a new index, because flags in the old one could hide a change
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def file_at(self, revision: str, name: str) -> bytes:
        """Return the bytes of a tracked file at a revision."""
        done = run_git(self.root, "show", f"{revision}:{name}")
        if done.returncode:
            raise UsageError(
                f"{revision}:{name} is not in the history of {self.root}; this lists what is: git -C {self.root} log "
                f"--oneline -- {name}"
            )
        return done.stdout

    def extract(self, revision: str, folder: Path) -> Path:
        """Write kernel.py of a revision into `folder`."""
        path = folder / f"kernel_{revision[:12].replace('/', '_')}.py"
        bundle.write_bytes(path, self.file_at(revision, "kernel.py"))
        return path

    def first_reference(self) -> bytes:
        """Return reference.py of the first commit. This oracle may not change."""
        first = self.git("rev-list", "--max-parents=0", "HEAD").splitlines()[-1]
        return self.file_at(first, "reference.py")
