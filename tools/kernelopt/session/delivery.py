"""Bring home what work elsewhere changed in a workspace: all of it or nothing, also when this process is killed.

The changes are staged in .git beside a journal, then copied to their places. What a kill divides, `finish` completes:
Workspace.locked calls it. Where .git is read-only they are staged in .cache, and what a kill divides stays so.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from .. import bundle
from ..errors import IN_A_SANDBOX, EnvironmentLacks, UsageError
from . import trees
from .trees import Changes, Tree

STAGED = f"{trees.OWN_IN_GIT}incoming-"
JOURNAL = "journal.json"
ABANDONED_S = 3600  # a delivery takes seconds
DERIVED = ("/.git/index", "/.git/logs", "/report.html")  # written anew from the rest
STATELESS = ("/.git/objects", "/.git/COMMIT_EDITMSG", "/.git/ORIG_HEAD")  # an object's name is the hash of its content
FORBIDDEN = ("/.git/config", "/.git/hooks")  # no tool changes them, and git would run what they name
FOLDERS = ("", "/.git")  # these are nothing else


def conflicts(workspace: str, before: Tree, now: Tree, changed: Iterable[str] | None = None) -> list[str]:
    """The paths that differ here from the tree that the work began with. Pure.

    changed: only these paths count; None: all of the workspace. See `counts` for what never does.
    """
    here = trees.changes(before, now)
    names = here if changed is None else [name for name in changed if name in here]
    return [name for name in names if trees.is_below(name, workspace) and counts(name, workspace)]


def counts(name: str, workspace: str) -> bool:
    """Whether a path of the workspace is more than its cache, derived from the rest, or the same anywhere. Pure."""
    apart = tuple(workspace + one for one in (*DERIVED, *STATELESS))
    return not trees.cached(name, workspace) and not name.startswith(apart)


def deliver(root: Path, changed: Changes, contents: Iterable[tuple[str, bytes]]) -> None:
    """Apply the changes, whose names are paths below `root`, and give each file the content with its digest.

    UsageError, and nothing is changed, when a path leads out of the workspace or a content is missing. EnvironmentLacks
    when .git is read-only and something was changed there.
    """
    check_safe(root, changed)
    if not changed:
        return
    folder, changed = staged(root, changed, contents)
    try:
        apply(folder, changed)
    except (KeyboardInterrupt, SystemExit):  # what has begun is completed
        apply(folder, changed)
        remove(folder)
        raise
    remove(folder)


def staged(root: Path, changed: Changes, contents: Iterable[tuple[str, bytes]]) -> tuple[Path, Changes]:
    """(a new folder with the contents of the changes and their journal, the changes that can be made)."""
    folder = new_folder(root)
    try:
        if (root / ".git").is_dir() and folder.parent.name != ".git":
            changed = outside_git(root, changed)
        for digest, content in contents:
            bundle.write_bytes(folder / digest, content)
        if lacking := [one for one in trees.digests(changed.values()) if not (folder / one).is_file()]:
            raise UsageError(f"{len(lacking)} changed files did not arrive; nothing was changed here; run it again")
        bundle.write_bytes(folder / JOURNAL, json.dumps(changed).encode())  # escapes names that are no UTF-8
    except BaseException:
        remove(folder)
        raise
    return folder, changed


def new_folder(root: Path) -> Path:
    """In .git, or in .cache where .git is absent, or read-only as in Codex's sandbox."""
    with contextlib.suppress(OSError):
        return Path(tempfile.mkdtemp(prefix=STAGED, dir=root / ".git"))
    (root / ".cache").mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=STAGED, dir=root / ".cache"))


def outside_git(root: Path, changed: Changes) -> Changes:
    """The changes that need no .git, without what is derived there."""
    git = f"{root}/.git"
    inside = {name for name in changed if trees.is_below(name, git)}
    if lacking := sorted(name for name in inside - {git} if counts(name, str(root))):
        raise EnvironmentLacks(f"{git} is read-only here, and {lacking[0]} was changed elsewhere; {IN_A_SANDBOX}")
    return {name: kind for name, kind in changed.items() if name not in inside}


def finish(root: Path) -> None:
    """Complete the deliveries that were killed after their journal was written, and remove the others."""
    for folder in (root / ".git").glob(f"{STAGED}*"):  # not in .cache, where a kernel could put a journal of its own
        if (folder / JOURNAL).is_file():
            apply(folder, bundle.read_json(folder / JOURNAL))
            remove(folder)
            continue
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                remove(folder)


def remove(folder: Path) -> None:
    """Remove a delivery, its contents before its journal: another process may be completing it."""
    for path in sorted(folder.glob("*"), key=lambda path: path.name == JOURNAL):
        path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def apply(folder: Path, changed: Changes) -> None:
    """Copy the staged contents to their places, git's objects first; may be done more than once."""
    for name, kind in sorted(changed.items(), key=lambda item: ("/.git/objects/" not in item[0], item[0])):
        if kind is not None:
            put(Path(name), kind, folder)
    for name in sorted(changed, reverse=True):  # what is in a folder before the folder
        if changed[name] is None:
            remove_entry(Path(name))


def put(path: Path, kind: str, folder: Path) -> None:
    """Make `path` what its entry says, with a content that lies in `folder` under its digest."""
    if kind == trees.FOLDER:
        if path.is_symlink() or not path.is_dir():
            remove_entry(path)
            path.mkdir(parents=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name[:100]}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    if kind.startswith("link "):
        new.symlink_to(kind.removeprefix("link "))
    else:
        _, mode, digest = kind.split()
        with contextlib.suppress(FileNotFoundError):  # gone: another process has completed this delivery
            shutil.copyfile(folder / digest, new)
            new.chmod(int(mode, 8))
    if new.is_symlink() or new.exists():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        new.replace(path)


def remove_entry(path: Path) -> None:
    """Remove a file, a link, or a folder if it is empty. It may be absent."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # something of this machine is in it
                path.rmdir()
        else:
            path.unlink()


def check_safe(root: Path, changed: Changes) -> None:
    """UsageError when a change is outside `root`, would follow a link, or has git run another program."""
    trees.check_names(changed)
    links = {name for name, kind in changed.items() if kind and kind.startswith("link ")}
    folders = [f"{root}{one}" for one in FOLDERS]
    for name, kind in changed.items():
        forbidden = name.startswith(tuple(f"{root}{one}" for one in FORBIDDEN))
        if forbidden or not trees.is_below(name, str(root)) or (name in folders and kind != trees.FOLDER):
            raise UsageError(f"{name} must not be changed from elsewhere; nothing was changed here")
        parents = Path(name).parents
        if any(str(parent) in links for parent in parents) or leads_out(root, Path(name), kind):
            raise UsageError(f"{name} leads out of {root}; nothing was changed here")


def leads_out(root: Path, path: Path, kind: str | None) -> bool:
    """Whether a change at `path` would land outside `root`, or is a link to outside."""
    home = Path(os.path.realpath(path.parent))
    if not home.is_relative_to(root):
        return True
    if not kind or not kind.startswith("link "):
        return False
    return not Path(os.path.normpath(home / kind.removeprefix("link "))).is_relative_to(root)
