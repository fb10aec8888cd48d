"""A folder that holds another machine's files at their own paths, so that a tool can work on them there."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .. import bundle
from ..errors import EnvironmentLacks, UsageError
from ..session import delivery, trees
from ..session.trees import Changes, Tree

TOKEN_FILE = "token"  # in node_folder
USUAL = Path("/tmp")  # where that lies without TMPDIR
UNUSED_S = 7 * 24 * 3600  # after that, a mirror is removed


def node_folder() -> Path:
    """The folder of this user's nodes on this machine, made if absent. EnvironmentLacks when others may use it."""
    return bundle.private_folder(place())


def place() -> Path:
    return Path(tempfile.gettempdir()).resolve() / f"kernelopt-node-{os.geteuid()}"


def token_file() -> Path | None:
    """The token of the nodes that this user starts on this machine; None where none was started. Agents have a TMPDIR
    of their own, nodes mostly none."""
    files = (folder / place().name / TOKEN_FILE for folder in (place().parent, USUAL))
    return next((file for file in files if file.is_file() and bundle.is_private(file.parent)), None)


class Mirror:
    """root: the folder below which the client's paths lie. workspace: one of them, or None. tree: the client's."""

    tree: Tree

    def __init__(self, root: Path, workspace: str | None):
        self.root, self.workspace = Path(os.path.realpath(root)), workspace

    def adopt(self, tree: Tree) -> set[str]:
        """Make the mirror like the tree, except for contents that it lacks. Return their digests.

        What no longer belongs to the tree is removed; the cache of compiled kernels stays.
        """
        trees.check_names(tree)
        present = trees.scan(self._top(), self.workspace, str(self.root))
        for name in sorted(present.keys() - tree.keys(), reverse=True):
            if not trees.cached(name, self.workspace):
                delivery.remove_entry(self.path(name))
        new = {name: kind for name, kind in sorted(tree.items()) if present.get(name) != kind}
        new = {name: kind for name, kind in new.items() if not trees.cached(name, self.workspace)}
        for name, kind in new.items():
            if not trees.digest_of(kind):
                self._put(name, kind)
        self.tree = tree
        self._lacking = {name: digest for name, kind in new.items() if (digest := trees.digest_of(kind))}
        return set(self._lacking.values())

    def receive(self, digest: str, content: bytes) -> None:
        """Write a content to the files that lack it."""
        for name in [name for name, one in self._lacking.items() if one == digest]:
            path = self.path(name)
            delivery.remove_entry(path)
            path.write_bytes(content)
            path.chmod(int(self.tree[name].split()[1], 8))
            del self._lacking[name]

    def path(self, name: str) -> Path:
        return Path(f"{self.root}{name}")

    def changes(self, names: list[str]) -> Changes:
        """What differs from the tree below these paths; paths of the mirror that its texts name become the client's."""
        after = trees.scan(names, self.workspace, str(self.root))
        changed = trees.changes(only_below(names, self.tree), only_below(names, after))
        for name, kind in changed.items():
            if trees.digest_of(kind) and self._localise(name):
                changed[name] = trees.entry(self.path(name))
        return {name: kind for name, kind in changed.items() if kind or not trees.cached(name, self.workspace)}

    def contents(self, changed: Changes) -> Iterator[tuple[str, bytes]]:
        """(digest, content) of each file among the changes, once."""
        sent: set[str] = set()
        for name, kind in changed.items():
            digest = trees.digest_of(kind)
            if digest and digest not in sent:
                sent.add(digest)
                yield digest, self.path(name).read_bytes()

    def _top(self) -> list[str]:
        return [f"/{path.name}" for path in sorted(self.root.iterdir())]

    def _put(self, name: str, kind: str) -> None:
        path = self.path(name)
        if kind.startswith("alias "):
            kind = f"link {self.root}{kind.removeprefix('alias ')}"
        delivery.put(path, kind, self.root)

    def _localise(self, name: str) -> bool:
        """Take the mirror's path out of a text outside git and cache; whether it was there."""
        path, own = self.path(name), os.fsencode(self.root)
        content = path.read_bytes()
        if own not in content or "/.git/" in name or "/.cache/" in name or not is_text(content):
            return False
        path.write_bytes(content.replace(own, b""))
        return True


def only_below(names: list[str], tree: Tree) -> Tree:
    """The part of a tree that lies at or below these paths. Pure."""
    return {name: kind for name, kind in tree.items() if any(trees.is_below(name, one) for one in names)}


def is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def take(key: str, workspace: str | None) -> tuple[Mirror, IO]:
    """A mirror that nobody uses, one of former work under this key if possible, and its lock. Old ones are removed."""
    if not key.isalnum():
        raise UsageError(f"{key!r} is no name of a mirror")
    home = node_folder()
    remove_unused(home)
    for number in range(1000):
        folder = home / f"{key}-{number}"
        (folder / "files").mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")  # noqa: SIM115 (held while the mirror is used)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(folder / "lock")
            return Mirror(folder / "files", workspace), lock
        except BlockingIOError:
            lock.close()
    raise EnvironmentLacks(f"1000 commands work in {home}; wait for one to end")


def remove_unused(home: Path) -> None:
    """Remove the mirrors that were not used for a week."""
    for path in home.glob("*/lock"):
        if time.time() - path.stat().st_mtime > UNUSED_S:
            with open(path) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                shutil.rmtree(path.parent, ignore_errors=True)
