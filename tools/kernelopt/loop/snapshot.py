"""The workspace as it was before agents or measurements ran. Their changes to it are found, named and undone.

The snapshot is in memory, and in .loop/kept.tar in case the run is killed. Agents work elsewhere (agent_sandbox.py),
and behind bubblewrap where that works. Without it they have the user's rights, and the snapshot guards against mistakes
and plain cheating.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import bundle
from ..errors import UsageError
from ..session.digests import digest as digest_of
from ..session.git_commands import run_git
from ..session.workspace import KEPT_FILE, Workspace
from . import file_trees
from .file_trees import ensure_folder, remove, remove_unless_file

NOT_KEPT = (".loop", ".cache", "report.html")  # of the workspace: its own tools write these meanwhile
GIT_NOT_KEPT = ("index", "logs", "kernelopt-lock")  # each of our commits writes its index anew
ENTRIES = "tokens.json"  # in the archive, beside the files
OWN_REFS = "refs/kernelopt"
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Snapshot:
    """entries: of all names in the workspace. contents: of its files. head: its commit. digest: of the archive."""

    digest: str | None = None

    def __init__(self, root: Path, head: str, entries: dict[str, str], contents: dict[str, bytes]):
        self.root, self.head, self.entries, self.contents = root, head, entries, contents

    @classmethod
    def take(cls, workspace: Workspace) -> "Snapshot":
        """The workspace as it is now, also on disk."""
        entries = everything(workspace.root)
        contents = {n: (workspace.root / n).read_bytes() for n, kind in entries.items() if kind.startswith("file ")}
        snapshot = cls(workspace.root, workspace.git("rev-parse", "HEAD"), entries, contents)
        packed = snapshot._packed()
        snapshot.digest = hashlib.sha256(packed).hexdigest()
        discard(workspace.root)
        bundle.write_bytes(archive(workspace.root), packed)
        return snapshot

    @classmethod
    def load(cls, root: Path, digest: str | None = None) -> "Snapshot | None":
        """The snapshot that a killed run left in the workspace `root`; None without one.

        digest: SHA-256 of the archive, as the run's state has it. UsageError when the archive is another one, because
        the agents' changes are then unknown.
        """
        path = archive(root)
        exists = path.is_file() and not path.is_symlink()
        if digest and not (exists and digest_of(path) == digest):
            raise UsageError(
                f"{path} is not what the run kept before it asked its agents, so their changes to the workspace are "
                f"unknown: look at its git log and memory/, then remove {path.with_name('state.json')}"
            )
        if not exists:
            return None
        try:
            with tarfile.open(path) as packed:
                contents = {member.name: packed.extractfile(member).read() for member in packed.getmembers()}
            known = json.loads(contents.pop(ENTRIES))
            files = {name.removeprefix("w/"): content for name, content in contents.items()}
            return cls(root, known["head"], known["tokens"], files)
        except (tarfile.TarError, ValueError, KeyError, AttributeError):
            raise UsageError(f"{path} cannot be read; look at the workspace, then remove that file") from None

    def _packed(self) -> bytes:
        packed = io.BytesIO()
        known = json.dumps({"head": self.head, "tokens": self.entries}).encode()
        with tarfile.open(fileobj=packed, mode="w") as file:
            for name, content in {ENTRIES: known, **{f"w/{n}": c for n, c in self.contents.items()}}.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
        return packed.getvalue()

    def restore(self, distrust: Callable[[], None]) -> list[str]:
        """Undo every change since. Returns the names of what was changed, with a remark where it could not be undone.

        New files and changed ones are moved to .loop/taken. distrust: called first if anything was changed, because a
        run that is killed afterwards would not see the change again. UsageError when something new cannot be removed.
        """
        ensure_folder(archive(self.root).parent)
        unlock_git(self.root)
        changed = self._changed()
        if changed:
            distrust()
        commits = self._new_commits(changed)
        new = [name for name in changed if name not in self.entries]
        moved = [name for name in new if self._move_away(name)]
        reports = [self._restored(name) for name in changed if name in self.entries]
        if moved and (left := [name for name in self._changed() if name not in self.entries]):
            raise UsageError(f"{self.root / left[0]} appeared while agents worked; remove it yourself, then --resume")
        mend_git(self.root, self.head)
        return [*self._keep_commits(commits), *sorted([*moved, *reports])]

    def _changed(self) -> list[str]:
        """The names of changed entries. New objects of git, and this module's references to them, are no change."""
        now = everything(self.root)
        names = [name for name in sorted({*now, *self.entries}) if now.get(name) != self.entries.get(name)]
        harmless = (".git/objects/", f".git/{OWN_REFS}")
        return [name for name in names if name in self.entries or not name.startswith(harmless)]

    def _new_commits(self, changed: list[str]) -> list[str]:
        """The commits of the branches that were changed. Read without git, which may have been set up to hang."""
        paths = [self.root / name for name in changed if name.startswith(".git/refs/heads/")]
        heads = {path.read_bytes()[:64].strip().decode(errors="replace") for path in paths if path.is_file()}
        return sorted(commit for commit in heads if COMMIT.fullmatch(commit))

    def _keep_commits(self, commits: list[str]) -> Iterator[str]:
        """Make a reference to each new commit, so that git keeps it, and name it."""
        for commit in commits:
            reference = f"{OWN_REFS}/taken-{commit[:10]}"
            if commit != self.head and not run_git(self.root, "update-ref", reference, commit).returncode:
                yield f"the history (HEAD; {commit[:10]} is kept as {reference})"

    def _restored(self, name: str) -> str:
        """Restore a file, folder or link. Return its name, with a remark where that failed."""
        path, kind = self.root / name, self.entries[name]
        with contextlib.suppress(OSError):
            if kind == file_trees.FOLDER:
                ensure_folder(path, lambda: self._move_away(name))
                return name
            if kind.startswith("link "):
                self._move_away(name)
                path.symlink_to(kind.removeprefix("link "))
                return name
            if name in self.contents:
                self._move_away(name)
                bundle.write_bytes(path, self.contents[name])
                path.chmod(int(kind.split()[1], 8))
                return name
        return f"{name} (which cannot be put back)"

    def _move_away(self, name: str) -> bool:
        """Move a file, folder or link to .loop/taken; False when it went with its folder already."""
        path = self.root / name
        if not os.path.lexists(path):
            return False
        taken = self.root / ".loop" / "taken"
        for folder in (taken.parent, taken):
            ensure_folder(folder)
        try:
            path.rename(taken / f"{time.time_ns()}_{path.name[:50]}")
        except OSError:  # a folder without rights, for example
            remove(path)
        return True


def archive(root: Path) -> Path:
    return root / KEPT_FILE


def discard(root: Path) -> None:
    """Remove the archive: the workspace is as it should be."""
    remove(archive(root))


def everything(root: Path) -> dict[str, str]:
    """The entries of everything in a snapshot of the workspace `root`, with its git."""
    git = {f".git/{name}": kind for name, kind in file_trees.entries(root / ".git", GIT_NOT_KEPT).items()}
    return file_trees.entries(root, (*NOT_KEPT, ".git")) | git


def unlock_git(root: Path) -> None:
    """Remove the locks of git commands that were killed. No other command works on the workspace now."""
    for path, kind in file_trees.walk(root / ".git"):
        if path.suffix == ".lock" and kind != file_trees.FOLDER:
            remove(path)


def mend_git(root: Path, head: str) -> None:
    """Repair the index and the logs of .git after its files were restored, and set HEAD to the commit `head`."""
    git = root / ".git"
    for name in ("index", "kernelopt-lock"):
        remove_unless_file(git / name)
    if not is_plain_tree(git / "logs"):
        remove(git / "logs")
    if not (git / "index").exists():
        run_git(root, "read-tree", "HEAD")
    if run_git(root, "rev-parse", "HEAD").stdout.decode().strip() != head:
        run_git(root, "update-ref", "HEAD", head)


def is_plain_tree(folder: Path) -> bool:
    """Whether this folder holds only plain files and folders."""
    if not os.path.lexists(folder) or file_trees.entry(folder) != file_trees.FOLDER:
        return False
    kinds = file_trees.entries(folder).values()
    return all(kind == file_trees.FOLDER or kind.startswith("file") for kind in kinds)
