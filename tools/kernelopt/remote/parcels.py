"""One file for a trip without a connection: a workspace, or what was changed in it elsewhere. A tar.gz archive.

It holds manifest.json first, then each content once, as files/SHA-256. Nothing is extracted by the name in the archive.
"""

import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .. import bundle, environment
from ..errors import EnvironmentLacks, UsageError
from ..session import trees
from ..session.digests import content_digest
from ..session.trees import Changes, Tree

MANIFEST = "manifest.json"
CONTENTS = "files/"
KINDS = ("workspace", "result")
ENTRY = re.compile(r"folder|(link|alias) .+|file [0-7]{1,4} [0-9a-f]{64}", re.DOTALL)


@dataclass(frozen=True)
class Parcel:
    """kind: one of KINDS. version: of the bundle that packed it. workspace: its path at home. tree: all that travels of
    it, with absolute paths, as it left home.

    Of a result: changes: made elsewhere. verdicts: a line each. alone: whether only the files that it changes must be
    as they were at home, not the whole workspace.
    """

    kind: str
    version: str
    workspace: str
    tree: Tree
    changes: Changes
    verdicts: tuple[str, ...] = ()
    alone: bool = False


def write(path: Path, parcel: Parcel, contents: Iterable[tuple[str, bytes]]) -> None:
    """Write a parcel in one step. contents: (digest, content) of its files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with tarfile.open(unfinished, "w:gz", compresslevel=6) as archive:
            add(archive, MANIFEST, json.dumps(asdict(parcel)).encode())
            for digest, content in contents:
                add(archive, CONTENTS + digest, content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def read(path: Path, kind: str) -> Parcel:
    """The parcel in a file. UsageError when it is none of this kind; EnvironmentLacks when it is another version's."""
    for name, content in members(path):
        parcel = parsed(content) if name == MANIFEST else None
        if parcel is None or parcel.kind != kind:
            break
        if parcel.version != environment.version():
            raise EnvironmentLacks(
                f"{path} is of version {parcel.version} of the bundle, this is {environment.version()}; "
                "use the same on both machines"
            )
        return parcel
    raise UsageError(f"{path} is no {kind} that carry.py has packed")


def parsed(content: bytes) -> Parcel | None:
    """The parcel in a manifest; None when it holds something else. UsageError for a path that leads out. Pure."""
    try:
        value = bundle.loads(content.decode())
        parcel = Parcel(**{**value, "verdicts": tuple(value["verdicts"])})
    except (ValueError, TypeError, KeyError):
        return None
    if value.keys() != {one.name for one in fields(Parcel)} or parcel.kind not in KINDS:
        return None
    if not all(isinstance(one, dict) for one in (parcel.tree, parcel.changes)):
        return None
    kinds = [*parcel.tree.values(), *(kind for kind in parcel.changes.values() if kind is not None)]
    if not all(isinstance(kind, str) and ENTRY.fullmatch(kind) for kind in kinds):
        return None
    trees.check_names([parcel.workspace, *parcel.tree, *parcel.changes])
    return parcel


def contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """(digest, content) of each file. UsageError when a content is not what its digest says."""
    for name, content in members(path):
        if name != MANIFEST:
            digest = name.removeprefix(CONTENTS)
            if content_digest(content) != digest:
                raise UsageError(f"{path} is damaged: {name} is not what it was; copy it again")
            yield digest, content


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each file in the archive."""
    if not path.is_file():
        raise UsageError(f"{path} does not exist")
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                if member.isreg():
                    yield member.name, archive.extractfile(member).read()
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UsageError(f"{path} cannot be read ({error}); copy it again") from None
