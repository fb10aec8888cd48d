"""List and remove folders that an agent may have changed. No link is followed."""

import contextlib
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from ..session import trees
from ..session.trees import FOLDER

LARGE = 4 << 20  # bytes; of a larger file the entry has size and time, and no content is kept
SPECIAL, UNREADABLE = "special", "unreadable"  # entries; the others are those of trees, and large files


def entries(root: Path, ignored: tuple[str, ...] = ()) -> dict[str, str]:
    """{name: entry} of everything in a folder, at any depth; see `entry`. ignored: names at the top level that are left
    out. __pycache__ is left out everywhere.
    """
    return {str(path.relative_to(root)): kind for path, kind in walk(root, ignored)}


def walk(root: Path, ignored: tuple[str, ...] = ()) -> Iterator[tuple[Path, str]]:
    """(path, entry) of everything in a folder."""
    folders = [root]
    while folders:
        folder = folders.pop()
        for name in listed(folder):
            path = folder / name
            if name == "__pycache__" or (folder == root and name in ignored):
                continue
            try:
                kind = entry(path)
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError:  # no right to it, or too deep
                kind = UNREADABLE
            yield path, kind
            folders += [path] * (kind == FOLDER)


def listed(folder: Path) -> list[str]:
    """The names in a folder; [] when it cannot be read. Rights that its owner removed are restored first."""
    with contextlib.suppress(OSError):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            folder.chmod(0o755)
        return [path.name for path in folder.iterdir()]
    return []


def entry(path: Path) -> str:
    """The entry of a path as `trees` has it, "special", or "large: SIZE bytes of TIME", which reads no content."""
    status = path.lstat()
    if stat.S_ISREG(status.st_mode) and status.st_size > LARGE:
        return f"large: {status.st_size} bytes of {status.st_mtime_ns}"
    return trees.entry(path) or SPECIAL


def ensure_folder(path: Path, move_away: Callable[[], object] | None = None) -> None:
    """Make `path` a folder, not a link to one. Anything else in its place is removed, or moved by `move_away`."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
        (move_away or (lambda: remove(path)))()
    path.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, at any depth and with any rights. It may be absent."""
    if path.is_dir() and not path.is_symlink():
        for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(path)], stderr=subprocess.DEVNULL)
            if not path.exists():
                break  # as a rule at once
    else:
        with contextlib.suppress(NotADirectoryError):  # a file lies where its folder was
            path.unlink(missing_ok=True)


def remove_unless_file(path: Path) -> None:
    """Remove anything at `path` that is no plain file."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        remove(path)
