"""Files as they travel to another machine: {absolute path: entry} of folders, links and files, and their contents.

| entry | is |
|---|---|
| folder | a folder |
| link TARGET | a symbolic link |
| alias PATH | a path that leads to another one of the tree |
| file MODE SHA-256 | a file |
"""

import hashlib
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from ..errors import UsageError

Tree = dict[str, str]
Changes = dict[str, str | None]  # None: removed

FOLDER = "folder"
CACHES_THAT_TRAVEL = ("triton", "extensions")  # of W/.cache: the compiled kernels that extract_asm.py reads
OWN_IN_GIT = "kernelopt-"  # locks and deliveries in .git; they stay where they are


def entry(path: Path) -> str | None:
    """The entry of a path; None for devices, pipes and the like. OSError when it cannot be read."""
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode):
        return FOLDER
    if stat.S_ISLNK(status.st_mode):
        return f"link {path.readlink()}"
    if not stat.S_ISREG(status.st_mode):
        return None
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            hashed.update(piece)
    return f"file {stat.S_IMODE(status.st_mode):o} {hashed.hexdigest()}"


def digest_of(kind: str | None) -> str | None:
    """The digest in the entry of a file; None for other entries."""
    return kind.split()[2] if kind and kind.startswith("file ") else None


def digests(kinds: Iterable[str | None]) -> set[str]:
    return {one for one in map(digest_of, kinds) if one}


def travels(name: str, workspace: str | None) -> bool:
    """Whether a path may be in a tree. Compiled Python, locks, and most of a workspace's cache stay where they are."""
    parts = PurePosixPath(name).parts
    if "__pycache__" in parts:
        return False
    if workspace is None or not is_below(name, workspace):
        return True
    own = parts[len(PurePosixPath(workspace).parts) :]
    if own[:1] == (".git",) and len(own) > 1:
        return not own[1].startswith(OWN_IN_GIT)
    return own[:1] != (".cache",) or len(own) == 1 or own[1] in CACHES_THAT_TRAVEL


def is_below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(f"{folder.rstrip('/')}/")


def cached(name: str, workspace: str | None) -> bool:
    """Whether a path is in the workspace's cache, whose files no record refers to."""
    return workspace is not None and is_below(name, f"{workspace}/.cache")


def scan(names: Iterable[str], workspace: str | None, mirror: str = "", most_bytes: float = math.inf) -> Tree:
    """The tree of these absolute paths, with the folders above them. Paths that do not exist are left out.

    mirror: the folder below which they lie, "" for /. UsageError when the files hold more than `most_bytes`.
    """
    tree: Tree = {}
    size = 0
    for name in names:
        real = os.path.realpath(mirror + name).removeprefix(mirror)
        if real != name:
            tree |= above(name, mirror) | {name: f"alias {real}"}
        for path, kind in walk(Path(mirror + real), workspace, mirror):
            tree[str(path).removeprefix(mirror)] = kind
            size += path.lstat().st_size if digest_of(kind) else 0
            if size > most_bytes:
                raise UsageError(f"the named files hold over {most_bytes / 2**30:.0f} GiB, with {name}; name fewer")
        tree = above(real, mirror) | tree
    return tree


def above(name: str, mirror: str) -> Tree:
    """The folders above a path that exist."""
    parents = (str(parent) for parent in PurePosixPath(name).parents)
    return {parent: FOLDER for parent in parents if parent != "/" and Path(mirror + parent).is_dir()}


def walk(path: Path, workspace: str | None, mirror: str) -> Iterator[tuple[Path, str]]:
    """(path, entry) of a path and of everything below it that travels. No link is followed."""
    if not travels(str(path).removeprefix(mirror), workspace):
        return
    try:
        kind = entry(path)
        children = sorted(path.iterdir()) if kind == FOLDER else []
    except FileNotFoundError:  # absent, or removed meanwhile
        return
    if kind:
        yield path, kind
    for child in children:
        yield from walk(child, workspace, mirror)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> Changes:
    """What differs in `after`. Pure."""
    names = sorted({*before, *after})
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def check_names(names: Iterable[str]) -> None:
    """UsageError for a path that is not absolute, or leads out of where it is."""
    for name in names:
        if not name.startswith("/") or os.path.normpath(name) != name:
            raise UsageError(f"{name!r} is no path of a file that travels")
