"""The records of a session: one JSON file a version, `memory/vN.json` (`reference/v_iteration.schema.json`).

Figures: 10,000 records as long as the example's, two busy cores, Python 3.11. memory_manager.py takes 0.1 s for one
version, two versions, the latest and the best. With a cache (record_cache.py) list and history take 0.2 to 0.3 s,
summary 0.4 s. Without one, and for the first history of a field that is not in SHORT, they take 1.3 s.
"""

import contextlib
import datetime
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

from .. import bundle
from ..errors import Refused, ToolError, UsageError
from . import record_fields
from .record import Record
from .record_cache import RecordCache
from .version_names import VERSION, version_number
from .workspace import Workspace

MEND = "mend it by hand (moved away, its round is lost)"
# Only run_gate.py writes these: the first always, the second once it has given its verdict.
GATE_FIELDS = ("version", "quality_gate", "kernel_sha256", "git_commit_hash")
MEASURED_FIELDS = ("performance", "correctness", "device", "timestamp")
# Cached together: all that `list` and `summary` of memory_manager.py print.
SHORT = (
    "masked",
    "timestamp",
    "device",
    "git_commit_hash",
    "performance.latency_us",
    "performance.floor_share_pct",
    "performance.comparison_with_previous",
    "correctness.status",
    "quality_gate.result",
    "optimization.action_description",
)


class RecordStore:
    """All records of one workspace. Every write is checked against the schema, atomic and under one lock.

    Files that are not valid records are never changed. `left_out` names them after a scan.
    """

    def __init__(self, workspace: Workspace):
        self.folder = workspace.memory
        self.restarts = workspace.memory / "restarts.json"  # the versions that partial_restart.py masked
        self.broken: list[str] = []
        self.masked = 0
        self.glances = workspace.root / ".loop" / "glances"
        self._held = False

    def path(self, version: str) -> Path:
        version_number(version)
        return self.folder / f"{version}.json"

    @contextlib.contextmanager
    def locked(self):
        """Block other processes that write records. The lock may be nested. Each thread needs its own RecordStore."""
        if self._held:
            yield
            return
        self.folder.mkdir(exist_ok=True)
        with bundle.lock_file(self.folder / ".lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            for half_written in self.folder.glob(".*.json.*"):  # left by a killed writer; this process holds the lock
                half_written.unlink(missing_ok=True)
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _stems(self) -> list[str]:
        """Return the names of the visible *.json files without the suffix."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []  # noqa: PTH208 (three times faster than iterdir)
        return [name[:-5] for name in names if name.endswith(".json") and not name.startswith(".")]

    def versions(self) -> list[str]:
        """Return the recorded versions, lowest first."""
        return sorted((stem for stem in self._stems() if VERSION.match(stem)), key=version_number)

    def read(self, version: str) -> Record:
        """Read one record. Raise Refused if it does not exist and UsageError if it is broken."""
        return Record.from_json(self.read_json(version))

    def read_json(self, version: str) -> dict:
        """Read the JSON object of one record. Raise Refused if it does not exist and UsageError if it is broken."""
        path = self.path(version)
        if not path.is_file():  # reading a pipe would block
            if path.exists():
                raise UsageError(f"{path} is no file; remove it")
            highest = self.versions()[-1:]
            raise Refused(
                f"{version} is not recorded; " + (f"the highest is {highest[0]}" if highest else "no version is yet")
            )
        record = load(path)
        if record["version"] != version:
            raise UsageError(f"{path} says that it is {record['version']}; {MEND}")
        return record

    def recall(self, version: str) -> Record:
        """Read one record for planning. Like `read`, but raise Refused if it is masked."""
        record = self.read(version)
        if record.masked:
            raise Refused(f"{version} is masked: discarded memory, not to be used for planning")
        return record

    def scan(self, masked: bool = False, highest_first: bool = False) -> Iterator[Record]:
        """Yield valid records, and masked ones only on request. `self.broken` names the invalid records;
        `self.masked` counts the masked records that were skipped."""
        return map(Record.from_json, self.scan_json(masked, highest_first))

    def scan_json(
        self, masked: bool = False, highest_first: bool = False, read: Callable[[str], dict] | None = None
    ) -> Iterator[dict]:
        """Yield the JSON objects of `scan`. read: a replacement for `read_json`."""
        self.broken, self.masked = [], 0
        for version in reversed(self.versions()) if highest_first else self.versions():
            try:
                record = (read or self.read_json)(version)
            except ToolError as error:  # broken, or removed after the listing
                self.broken.append(str(error))
                continue
            if masked or not record["masked"]:
                yield record
            else:
                self.masked += 1

    def records(self, masked: bool = False) -> list[Record]:
        """Return all valid records, lowest version first, and masked ones only on request. `self.broken` names the
        others."""
        return list(self.scan(masked))

    def glance(self, names: tuple[str, ...], masked: bool = False) -> Iterator[dict]:
        """Return `records` with only the version, `masked` and the fields `names`, which are fields of SHORT or one
        other field.

        Use it only for printing: unchanged files are not opened again. Code that judges must read the records.
        """
        cached = SHORT if set(names) <= set(SHORT) else ("masked", *names)
        cache = RecordCache(self.glances / ("short" if cached is SHORT else names[0]), cached, self.folder)
        paths = [name.split(".") for name in cached]
        wanted = ("masked", *names)
        places = [cached.index(name) for name in wanted]

        def cut(version: str) -> dict:
            if (values := cache.get(version)) is not None:
                return record_fields.joined(version, wanted, [values[place] for place in places])
            record = self.read_json(version)  # sound: it has these fields
            cache.put(version, [reduce(getitem, path, record) for path in paths])
            return record

        yield from self.scan_json(masked, read=cut)
        cache.save()

    def masked_versions(self) -> set[str]:
        """Return the versions of the valid records that are masked."""
        return {record.version for record in self.scan(masked=True) if record.masked}

    def history(self, name: str) -> list[record_fields.FieldValue]:
        """Return the values of a field in the unmasked records. The value is None if a record lacks the field. Raise
        UsageError if all records lack it."""
        entries, lacking = [], []
        for record in self.glance((record_fields.holder(name),)):
            try:
                value = record_fields.field(record, name)
            except UsageError as error:
                value = None
                lacking.append(error)
            entries.append(record_fields.FieldValue(record["version"], value))
        if entries and len(lacking) == len(entries):
            raise lacking[0]
        return entries

    def left_out(self) -> list[str]:
        """Describe the records that the last scan skipped: the names of broken records and foreign files, and the
        number of masked records."""
        stems = self._stems()
        foreign = [stem for stem in stems if not VERSION.match(stem) and stem != self.restarts.stem]
        named = [
            f"{self.folder / stem}.json is no record (records are v0.json, v1.json, …)" for stem in sorted(foreign)
        ]
        numbers = {version_number(stem) for stem in stems if VERSION.match(stem)}
        if gaps := max(numbers, default=-1) + 1 - len(numbers):
            first = itertools.islice((f"v{n}" for n in itertools.count() if n not in numbers), min(gaps, 5))
            named.append(f"no record of {', '.join(first)}{' …' * (gaps > 5)}: the file is gone")
        masked = [f"{self.masked} masked record{'s' if self.masked > 1 else ''}"] if self.masked else []
        return [*self.broken, *named, *masked]

    def create(self, version: str) -> Record:
        """Write and return an empty record. Raise Refused if the version has one."""
        with self.locked():
            if self.path(version).exists():
                raise Refused(f"{version} is recorded already; change it with: update --version {version} --set …")
            record = empty(version)
            self.save(record)
        return record

    def save(self, record: Record) -> None:
        """Write a whole record."""
        with self.locked():
            self._write(record.to_json())

    @contextlib.contextmanager
    def editing(self, version: str) -> Iterator[dict]:
        """Give the JSON object of a record for changes in place. It is read and written under one lock. It is
        written only if the block succeeds."""
        with self.locked():
            record = self.read_json(version)
            yield record
            self._write(record)

    def update(self, version: str, changes: dict[str, str]) -> Record:
        """Set fields, named by dotted path, from text. The schema decides the type of each value.

        Raise UsageError for fields that only the gate writes, such as verdicts and measurements. Raise Refused if the
        record is masked.
        """
        with self.editing(version) as record:
            for name, text in changes.items():
                _check_free(record, name)
                record_fields.assign(record, name, text)
        return Record.from_json(record)

    def append(self, version: str, name: str, items: list[str]) -> Record:
        """Append items to the list in the field `name`. Each item is the text of a JSON value. The checks of
        `update` apply."""
        with self.editing(version) as record:
            _check_free(record, name)
            values = record_fields.field(record, name)
            if not isinstance(values, list):
                lists = ", ".join(key for key, value in record.items() if isinstance(value, list))
                raise UsageError(f"'{name}' is no list; lists are: {lists}")
            values += [record_fields.json_value(item, name, "JSON values") for item in items]
        return Record.from_json(record)

    def set_masked(self, versions: list[str], masked: bool) -> None:
        """Mask or unmask records. Nothing changes unless all versions exist.

        Raise UsageError for masking v0 or the best version, because planning starts from them.
        """
        with self.locked():
            records = [self.read(version) for version in versions]
            best = self.best() if masked else None
            for name in ("v0", best.version if best else None):
                if masked and name in versions:
                    raise UsageError(f"{name} stays unmasked: planning starts from the baseline and the best version")
            for record in records:
                self.save(replace(record, masked=masked))

    def _write(self, record: dict) -> None:
        check(record, f"record {record['version']}")
        bundle.write_json(self.path(record["version"]), record)

    def best(self) -> Record | None:
        """Return the version to beat: the last accepted one. Each accepted version beat the one before in a paired
        measurement, so the last one is the best. Latencies from different times are never compared. Masking has no
        effect here. Raise UsageError if a later record is broken, because it could be the best."""
        for version in reversed(self.versions()):
            if self._has_no_commit(version):
                continue
            try:
                record = self.read(version)
            except UsageError as error:
                raise UsageError(f"the best version is unknown: {error}") from None
            if record.is_accepted:
                return record
        return None

    def _has_no_commit(self, version: str) -> bool:
        """Return whether the text of a record says that it has no commit. This avoids parsing thousands of rejected
        rounds after the best one. Quotes inside a JSON string are escaped, so a string cannot match."""
        with contextlib.suppress(UsageError, OSError):  # `read` reports the error
            return b'"git_commit_hash": null' in bundle.read_bytes(self.path(version))
        return False

    def next_version(self) -> str:
        """Return one above the highest recorded version, masked or not."""
        versions = self.versions()
        return f"v{version_number(versions[-1]) + 1}" if versions else "v0"


def load(path: Path) -> dict:
    """Read the valid record in `path`. The UsageError names the file and its error."""
    try:
        text = path.read_bytes().decode("utf-8")
        record = bundle.loads(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}); {MEND}") from None
    check(record, str(path), escapes="\\u" in text)
    return record


def check(record, title: str, escapes: bool = False) -> None:
    """Check `record` against the schema. The UsageError names the first invalid field of `title`.

    escapes: whether the source text has escapes. An escape can encode a lone surrogate, which cannot be written.
    """
    bundle.validate(record, record_fields.SCHEMA, title)
    if not escapes:
        return
    try:
        bundle.dumps(record).encode("utf-8")
    except ValueError as error:
        raise UsageError(f"{title} cannot be written as JSON ({error}); mend it") from None


def now() -> str:
    """Return the time in UTC, in the format of the records."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def empty(version: str) -> Record:
    """Make an empty record of `version` from the schema's list of fields."""
    schema = bundle.read_json(bundle.REFERENCE / record_fields.SCHEMA)
    return Record.from_json({**_blank(schema), "version": version, "masked": False, "timestamp": now()})


def _blank(schema: dict):
    if schema.get("type") == "object":
        return {name: _blank(schema["properties"][name]) for name in schema["required"]}
    return [] if schema.get("type") == "array" else None


def _check_free(record: dict, name: str) -> None:
    """Raise Refused if the record is masked, and UsageError if authors may not write the field."""
    if record["masked"]:
        raise Refused(f"{record['version']} is masked: discarded memory; unmask takes it back")
    judged = record["quality_gate"]["result"] is not None
    if name.split(".")[0] in (*GATE_FIELDS, *(MEASURED_FIELDS if judged else ())):
        raise UsageError(f"{name} is written by run_gate.py, from what it measured")
    if name == "masked":
        raise UsageError("the verbs mask and unmask change that")
