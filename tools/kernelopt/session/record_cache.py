"""A cache of some fields of all records. A record whose file has not changed is not opened again.

The cache can be deleted at any time; the records hold the data. A damaged cache file is ignored, and so is one from
another version of these modules. The cache is in `.loop` because kernels under test may write to `.cache` and could
forge it there.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from .. import bundle
from .digests import digest

SETTLED_NS = 2 * 10**9  # within one tick of a file system's clock a file can change twice and look the same
# A valid record stays valid until one of these files changes.
JUDGES = ("session/record_cache.py", "session/record_store.py", "bundle.py", "../../reference/v_iteration.schema.json")


class RecordCache:
    """The fields `names` (dotted paths that every record has) of the records in `folder`, cached in the file `path`.

    The file: the checksum of the rest, a line end, one JSON object {version: [state of its file, value of each name]}.
    """

    def __init__(self, path: Path, names: tuple[str, ...], folder: Path):
        self.path = path
        self._writer = json.dumps([*(digest(bundle.ROOT / "tools" / "kernelopt" / judge) for judge in JUDGES), *names])
        # Before a record is read: a record that changes meanwhile has another state the next time.
        self._states = settled_states(folder)
        self._rows = self._read()
        self._changed = False

    def get(self, version: str) -> list | None:
        """Return the values of `names`, or None if the record has to be read."""
        row = self._rows.get(version)
        return row[1:] if row and row[0] == self._states.get(f"{version}.json") else None

    def put(self, version: str, values: list) -> None:
        """Store the values of a record. A record that has just changed is not cached."""
        if state := self._states.get(f"{version}.json"):
            self._rows[version] = [state, *values]
            self._changed = True

    def save(self) -> None:
        """Write the file if there are new values. A cache that cannot be written is skipped."""
        if not self._changed:
            return
        with contextlib.suppress(OSError, RecursionError):
            body = json.dumps(self._rows).encode()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # a process with the old file open keeps reading it
            self.path.write_bytes(self._checksum(body) + b"\n" + body)  # an incomplete write fails the checksum

    def _read(self) -> dict[str, list]:
        with contextlib.suppress(OSError):
            if self.path.is_file():  # opening a pipe would block
                checksum, _, body = self.path.read_bytes().partition(b"\n")
                if checksum == self._checksum(body):
                    return json.loads(body)
        return {}

    def _checksum(self, body: bytes) -> bytes:
        """Return a checksum that covers the writer too, so that the cache of another version does not match."""
        return hashlib.sha256(self._writer.encode() + body).hexdigest().encode()


def settled_states(folder: Path) -> dict[str, str]:
    """Return {file name: state} of `folder`. The state is a text that changes with the file. Files that changed
    within SETTLED_NS are left out."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # names relative to a handle resolve faster than paths
    except OSError:
        return {}
    states = {}
    settled = time.time_ns() - SETTLED_NS
    for name in os.listdir(handle):  # noqa: PTH208 (pathlib takes no handles)
        try:
            status = os.stat(name, dir_fd=handle)
        except OSError:  # removed meanwhile, or a dangling link
            continue
        if max(status.st_mtime_ns, status.st_ctime_ns) < settled:
            states[name] = f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino} {status.st_size}"
    os.close(handle)
    return states
