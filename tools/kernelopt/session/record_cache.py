"""Some fields of all records, kept from one look to the next: a record whose file is as it was need not be opened again.

Derived and disposable, the records are the truth: what is torn, made by another bundle or not to be written counts for nothing. It lies in
`.loop`; in `.cache` kernels under test may write, and could forge there what they cannot forge in `memory/`.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from .workspace import digest

FEW = 100  # so many records are read again as soon as all that is kept is written again
SETTLED_NS = 2 * 10**9  # in one step of a file system's time, never longer, a file can change again unseen
JUDGES = (
    "record_cache.py",
    "record_store.py",
    "record_validation.py",
    "../bundle.py",
)  # what they took for sound is sound until they change


class Glance:
    """The fields `names` (dotted paths that every record has) of the records in `folder`, as far as the file `path` keeps them.

    The file: a sum of the rest; a line {version: state of its file}; for each name a line with these versions' values.
    """

    def __init__(self, path: Path, names: tuple[str, ...], schema: Path, folder: Path):
        self.path, self.names = path, names
        self._maker = [*map(digest, (schema, *map(Path(__file__).parent.joinpath, JUDGES))), *names]
        self._now = states(folder)  # before a record is read: one that changes meanwhile differs at the next glance
        self._lines = self._read()
        self._new: dict[str, list] = {}

    def kept(self, names: tuple[str, ...]) -> dict[str, list]:
        """{version: values of `names`} of the records whose files are as they were."""
        lines = (self._lines[0], *(self._lines[1 + self.names.index(name)] for name in names))
        was, *columns = map(json.loads, lines)
        rows = zip(was.items(), *columns, strict=True)
        return {version: values for (version, state), *values in rows if self._now.get(f"{version}.json") == state}

    def add(self, version: str, values: list) -> None:
        """Take in the values of `self.names` in a record that had to be read."""
        if f"{version}.json" in self._now:
            self._new[version] = values

    def close(self) -> None:
        """Write what is to be kept, when that is worth it. A write that is cut short is known by its sum."""
        if len(self._new) <= FEW:
            return
        rows = self.kept(self.names) | self._new
        columns = ({version: self._now[f"{version}.json"] for version in rows}, *zip(*rows.values(), strict=True))
        with contextlib.suppress(OSError, RecursionError):
            lines = [json.dumps(column).encode() + b"\n" for column in columns]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # who reads it now reads on
            self.path.write_bytes(b"".join([self._sum(lines), *lines]))

    def _read(self) -> list[bytes]:
        with contextlib.suppress(OSError):
            if self.path.is_file():  # a pipe would be waited for
                total, *lines = self.path.read_bytes().splitlines(keepends=True) or [b""]
                if total == self._sum(lines):
                    return lines
        return [b"{}", *(b"[]" for _ in self.names)]

    def _sum(self, lines: list[bytes]) -> bytes:
        """Of who made it as well, so that another's is none."""
        total = hashlib.sha256(json.dumps(self._maker).encode())
        for line in lines:
            total.update(line)
        return total.hexdigest().encode() + b"\n"


def states(folder: Path) -> dict[str, str]:
    """{name: a word that differs when the file has changed} of the files in `folder`, but for those that changed just now."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # names below it are found sooner than whole paths
    except OSError:
        return {}
    found = {}
    settled = time.time_ns() - SETTLED_NS
    for name in os.listdir(handle):  # noqa: PTH208 (pathlib knows no handles)
        try:
            what = os.stat(name, dir_fd=handle)
        except OSError:  # gone, or a link to nothing
            continue
        if max(what.st_mtime_ns, what.st_ctime_ns) < settled:
            found[name] = f"{what.st_mtime_ns} {what.st_ctime_ns} {what.st_ino} {what.st_size}"
    os.close(handle)
    return found
