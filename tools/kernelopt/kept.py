"""The workspace as it was before agents worked on their desks: what they change in it all the same is found, named and put back.

It is kept in memory, and in .loop/kept.tar for a run that is killed meanwhile. An agent has the user's rights, so that this guards against
mistakes and plain cheating; it is no wall.
"""

import contextlib
import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path

from . import bundle
from .errors import UsageError
from .workspace import KEPT_FILE, Workspace, run_git

LARGE = 4 << 20  # bytes; a larger file is told by its size and time, and cannot be put back
NOT_KEPT = (".loop", ".cache", "report.html")  # of the workspace: what its own tools write meanwhile
GIT_NOT_KEPT = ("index", "logs", "kernelopt-lock")  # every commit of ours makes its index anew
TOKENS = "tokens.json"  # in the archive, beside the files


class Kept:
    """tokens: of all names in the workspace (see `seen`). contents: of its files. head: its commit."""

    def __init__(self, root: Path, head: str, tokens: dict[str, str], contents: dict[str, bytes]):
        self.root, self.head, self.tokens, self.contents = root, head, tokens, contents

    @classmethod
    def of(cls, workspace: Workspace) -> "Kept":
        """The workspace as it is now, also on disk."""
        tokens = everything(workspace.root)
        contents = {n: (workspace.root / n).read_bytes() for n, token in tokens.items() if token.startswith("file ")}
        kept = cls(workspace.root, workspace.git("rev-parse", "HEAD"), tokens, contents)
        bundle.write_bytes(archive(workspace.root), kept._packed())
        return kept

    @classmethod
    def left(cls, root: Path) -> "Kept | None":
        """What a run that was killed among its agents has kept of the workspace in `root`; None where there is none."""
        path = archive(root)
        if not path.is_file() or path.is_symlink():
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

    def put_back(self) -> list[str]:
        """Restore what was changed or removed; what lies there instead, and what is new, goes to .loop/taken. Returns their names,
        with a word where that was not possible."""
        real_folder(archive(self.root).parent)
        unlock_git(self.root)
        moved = run_git(self.root, "rev-parse", "HEAD").stdout.decode().strip() != self.head
        now = everything(self.root)
        changed = [name for name in sorted({*now, *self.tokens}) if now.get(name) != self.tokens.get(name)]
        changed = [name for name in changed if name in self.tokens or not name.startswith(".git/objects/")]
        new = {name for name in changed if name not in self.tokens and self._put_aside(name)}
        meddled = ["the history (HEAD)"] * moved
        for name in changed:
            if name in self.tokens:
                meddled.append(name if self._restored(name) else f"{name} (which cannot be put back)")
            elif name in new:
                meddled.append(name)
        if moved:
            run_git(self.root, "update-ref", "HEAD", self.head)
        if not (self.root / ".git" / "index").exists():
            run_git(self.root, "read-tree", "HEAD")
        archive(self.root).unlink(missing_ok=True)
        return meddled

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
        with contextlib.suppress(OSError):
            path.rename(taken / f"{len(list(taken.iterdir()))}_{path.name[:50]}")
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
    found: dict[str, str] = {}
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
            found[str(path.relative_to(root))] = own
            folders += [path] * (own == "folder")
    return found


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
    for lock in (root / ".git").rglob("*.lock"):
        remove(lock)


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
        path.unlink(missing_ok=True)
