"""The workspace as it was before agents worked on their desks: what they change in it all the same is found, named and put back.

It is kept in memory, and in .loop/kept.tar for a run that is killed meanwhile. An agent has the user's rights, so that this guards against
mistakes and plain cheating; it is no wall.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import bundle
from ..errors import UsageError
from ..session.workspace import KEPT_FILE, Workspace, run_git
from ..session.workspace import digest as digest_of

LARGE = 4 << 20  # bytes; a larger file is told by its size and time, and cannot be put back
NOT_KEPT = (".loop", ".cache", "report.html")  # of the workspace: what its own tools write meanwhile
GIT_NOT_KEPT = ("index", "logs", "kernelopt-lock")  # every commit of ours makes its index anew
TOKENS = "tokens.json"  # in the archive, beside the files
OWN_REFS = "refs/kernelopt"
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Kept:
    """tokens: of all names in the workspace (see `seen`). contents: of its files. head: its commit. digest: SHA-256 of the archive."""

    digest: str | None = None

    def __init__(self, root: Path, head: str, tokens: dict[str, str], contents: dict[str, bytes]):
        self.root, self.head, self.tokens, self.contents = root, head, tokens, contents

    @classmethod
    def of(cls, workspace: Workspace) -> "Kept":
        """The workspace as it is now, also on disk."""
        tokens = everything(workspace.root)
        contents = {n: (workspace.root / n).read_bytes() for n, token in tokens.items() if token.startswith("file ")}
        kept = cls(workspace.root, workspace.git("rev-parse", "HEAD"), tokens, contents)
        packed = kept._packed()
        kept.digest = hashlib.sha256(packed).hexdigest()
        remove(archive(workspace.root))
        bundle.write_bytes(archive(workspace.root), packed)
        return kept

    @classmethod
    def left(cls, root: Path, digest: str | None = None) -> "Kept | None":
        """What a run that was killed among its agents has kept of the workspace in `root`; None where there is none.

        digest: of the archive that the run says it kept. UsageError when that is not what lies there: then nothing tells what
        in the workspace is the agents'.
        """
        path = archive(root)
        there = path.is_file() and not path.is_symlink()
        if digest and not (there and digest_of(path) == digest):
            raise UsageError(
                f"{path} is not what the run kept before it asked its agents, so that what they did to the workspace cannot be told: "
                f"look at its git log and memory/, then remove {path.with_name('state.json')}"
            )
        if not there:
            return None
        try:
            with tarfile.open(path) as packed:
                contents = {member.name: packed.extractfile(member).read() for member in packed.getmembers()}
            known = json.loads(contents.pop(TOKENS))
            return cls(root, known["head"], known["tokens"], {n[2:]: content for n, content in contents.items()})
        except (tarfile.TarError, ValueError, KeyError, AttributeError):
            raise UsageError(f"{path} cannot be read; look at the workspace, then remove that file") from None

    def _packed(self) -> bytes:
        packed = io.BytesIO()
        known = json.dumps({"head": self.head, "tokens": self.tokens}).encode()
        with tarfile.open(fileobj=packed, mode="w") as file:
            for name, content in {TOKENS: known, **{f"w/{n}": c for n, c in self.contents.items()}}.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
        return packed.getvalue()

    def put_back(self, distrust: Callable[[], None]) -> list[str]:
        """Restore what was changed or removed; what lies there instead, and what is new, goes to .loop/taken. Returns their names,
        with a word where that was not possible. UsageError where something new can neither be moved nor removed. distrust: called
        before anything is restored, if there is something: killed after that, it would not be seen any more."""
        real_folder(archive(self.root).parent)
        unlock_git(self.root)
        changed = self._changed()
        if changed:
            distrust()
        commits = self._commits(changed)
        new = {name for name in changed if name not in self.tokens and self._put_aside(name)}
        meddled = []
        for name in changed:
            if name in self.tokens:
                meddled.append(name if self._restored(name) else f"{name} (which cannot be put back)")
            elif name in new:
                meddled.append(name)
        if new and (stays := [name for name in self._changed() if name not in self.tokens]):
            raise UsageError(
                f"{self.root / stays[0]} came while agents worked and cannot be taken away; remove it, then --resume"
            )
        self._mend_git()
        return [*self._told(commits), *meddled]

    def _changed(self) -> list[str]:
        """The names that are not as they were. Objects of git that are new, and our own references to them, change nothing."""
        now = everything(self.root)
        names = [name for name in sorted({*now, *self.tokens}) if now.get(name) != self.tokens.get(name)]
        return [
            name for name in names if name in self.tokens or not name.startswith((".git/objects/", f".git/{OWN_REFS}"))
        ]

    def _commits(self, changed: list[str]) -> list[str]:
        """What the branches that were changed name now; read without git, which somebody may have made wait."""
        paths = [self.root / name for name in changed if name.startswith(".git/refs/heads/")]
        found = {path.read_bytes()[:64].strip().decode(errors="replace") for path in paths if path.is_file()}
        return sorted(commit for commit in found if COMMIT.fullmatch(commit))

    def _mend_git(self) -> None:
        """Once its files are back: what git itself writes is sound, and HEAD is where it was."""
        git = self.root / ".git"
        if (git / "index").is_symlink() or not (git / "index").is_file():
            remove(git / "index")
        logs = [token(git / "logs"), *seen(git / "logs", ()).values()] if os.path.lexists(git / "logs") else []
        if logs and (logs[0] != "folder" or any(what != "folder" and not what.startswith("file") for what in logs)):
            remove(git / "logs")
        remove_unless_file(git / "kernelopt-lock")
        if not (git / "index").exists():
            run_git(self.root, "read-tree", "HEAD")
        if run_git(self.root, "rev-parse", "HEAD").stdout.decode().strip() != self.head:
            run_git(self.root, "update-ref", "HEAD", self.head)

    def _told(self, commits: list[str]) -> Iterator[str]:
        """A line for each commit that came meanwhile, which a reference keeps."""
        for commit in commits:
            reference = f"{OWN_REFS}/taken-{commit[:10]}"
            if commit != self.head and not run_git(self.root, "update-ref", reference, commit).returncode:
                yield f"the history (HEAD; {commit[:10]} is kept as {reference})"

    def _restored(self, name: str) -> bool:
        """Put one back as it was; False where that is not possible."""
        path, token = self.root / name, self.tokens[name]
        with contextlib.suppress(OSError):
            if token == "folder":
                real_folder(path, aside=lambda: self._put_aside(name))
            elif token.startswith("link to "):
                self._put_aside(name)
                path.symlink_to(token.removeprefix("link to "))
            elif name in self.contents:
                self._put_aside(name)
                bundle.write_bytes(path, self.contents[name])
                path.chmod(int(token.split()[1], 8))
            else:
                return False
            return True
        return False

    def _put_aside(self, name: str) -> bool:
        """Move it into .loop/taken, links themselves and not what they lead to; False when it went with its folder already."""
        path = self.root / name
        if not os.path.lexists(path):
            return False
        taken = self.root / ".loop" / "taken"
        for folder in (taken.parent, taken):
            real_folder(folder)
        try:
            path.rename(taken / f"{time.time_ns()}_{path.name[:50]}")
        except OSError:  # a folder without rights, say
            remove(path)
        return True


def archive(root: Path) -> Path:
    return root / KEPT_FILE


def everything(root: Path) -> dict[str, str]:
    """Tokens of all that is kept of a workspace, its git's too."""
    git = {f".git/{name}": token for name, token in seen(root / ".git", GIT_NOT_KEPT).items()}
    return seen(root, (*NOT_KEPT, ".git")) | git


def seen(root: Path, ignored: tuple[str, ...]) -> dict[str, str]:
    """What lies in a folder, by name: "folder", "link to …", "special", "unreadable", "file" with its rights and SHA-256, and of a large file
    size and time. No link is followed. ignored: names at the top; __pycache__ is left out everywhere."""
    return {str(path.relative_to(root)): what for path, what in walked(root, ignored)}


def walked(root: Path, ignored: tuple[str, ...] = ()) -> Iterator[tuple[Path, str]]:
    """`seen`, one by one, however deep."""
    folders = [root]
    while folders:
        folder = folders.pop()
        for name in listed(folder):
            path = folder / name
            if name == "__pycache__" or (folder == root and name in ignored):
                continue
            try:
                own = token(path)
            except FileNotFoundError:  # gone again
                continue
            except OSError:  # no right to it, or too deep
                own = "unreadable"
            yield path, own
            folders += [path] * (own == "folder")


def listed(folder: Path) -> list[str]:
    """The names in a folder, whose owner may have taken the right to look away; [] of one that cannot be read."""
    with contextlib.suppress(OSError):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            folder.chmod(0o755)
        return [path.name for path in folder.iterdir()]
    return []


def token(path: Path) -> str:
    what = path.lstat()
    if stat.S_ISDIR(what.st_mode):
        return "folder"
    if stat.S_ISLNK(what.st_mode):
        return f"link to {path.readlink()}"
    if not stat.S_ISREG(what.st_mode):
        return "special"
    if what.st_size > LARGE:
        return f"large: {what.st_size} bytes of {what.st_mtime_ns}"
    return f"file {stat.S_IMODE(what.st_mode):o} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def unlock_git(root: Path) -> None:
    """Remove locks of git commands that are no more: nobody but us works on the workspace now."""
    for path, what in walked(root / ".git"):
        if path.suffix == ".lock" and what != "folder":
            remove(path)


def discard(root: Path) -> None:
    """The workspace is as it should be: what was kept of it is needed no longer."""
    remove(archive(root))


def real_folder(path: Path, aside=None) -> None:
    """`path` is a folder afterwards, and no link to one; what was there is removed, or put aside."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
        (aside or (lambda: remove(path)))()
    path.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """A file, a link or a folder with all in it, however deep and whatever the rights, or nothing."""
    if path.is_dir() and not path.is_symlink():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(path)], stderr=subprocess.DEVNULL)
    else:
        with contextlib.suppress(NotADirectoryError):  # a file where its folder was
            path.unlink(missing_ok=True)


def remove_unless_file(path: Path) -> None:
    """What somebody has put in a plain file's place goes."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        remove(path)
