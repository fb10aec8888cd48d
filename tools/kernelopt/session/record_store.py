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
from .record import Record
from .record_cache import RecordCache
from .workspace import VERSION, Workspace, version_number

SCHEMA = "v_iteration.schema.json"
MEND = "mend it by hand (moved away, its round is lost)"
GATE_FIELDS = ("version", "quality_gate", "kernel_sha256", "git_commit_hash")  # run_gate.py alone writes them
MEASURED_FIELDS = ("performance", "correctness", "device", "timestamp")  # and these, once it has judged
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

    What cannot be read as a record stays as it is and is named: `left_out` says so after a scan.
    """

    def __init__(self, workspace: Workspace):
        self.folder = workspace.memory
        self.restarts = workspace.memory / "restarts.json"  # what partial_restart.py masked
        self.broken: list[str] = []
        self.masked = 0
        self.glances = workspace.root / ".loop" / "glances"
        self._held = False

    def path(self, version: str) -> Path:
        version_number(version)
        return self.folder / f"{version}.json"

    @contextlib.contextmanager
    def locked(self):
        """No other process writes records meanwhile. May be nested; threads each take a RecordStore of their own."""
        if self._held:
            yield
            return
        self.folder.mkdir(exist_ok=True)
        with bundle.lock_file(self.folder / ".lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            for half_written in self.folder.glob(".*.json.*"):  # by a writer that was killed: the lock is ours
                half_written.unlink(missing_ok=True)
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _stems(self) -> list[str]:
        """What the names of the visible *.json files begin with."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []  # noqa: PTH208 (three times as quick as iterdir)
        return [name[:-5] for name in names if name.endswith(".json") and not name.startswith(".")]

    def versions(self) -> list[str]:
        """Recorded versions, lowest first."""
        return sorted((stem for stem in self._stems() if VERSION.match(stem)), key=_number)

    def read(self, version: str) -> Record:
        """One record; Refused when there is none, UsageError when it is broken."""
        return Record.from_json(self.read_json(version))

    def read_json(self, version: str) -> dict:
        """The JSON object of one record; Refused when there is none, UsageError when it is broken."""
        path = self.path(version)
        if not path.is_file():  # a pipe would be waited for
            if path.exists():
                raise UsageError(f"{path} is no file; remove it")
            highest = self.versions()[-1:]
            raise Refused(
                f"{version} is not recorded; " + (f"the highest is {highest[0]}" if highest else "nothing is")
            )
        record = load(path)
        if record["version"] != version:
            raise UsageError(f"{path} says that it is {record['version']}; {MEND}")
        return record

    def recall(self, version: str) -> Record:
        """One record for planning: `read`, and Refused when it is masked."""
        record = self.read(version)
        if record.masked:
            raise Refused(f"{version} is masked: discarded memory, not to be used for planning")
        return record

    def scan(self, masked: bool = False, highest_first: bool = False) -> Iterator[Record]:
        """Sound records one by one, masked ones only when asked. `self.broken` names those that are not sound,
        `self.masked` counts the masked ones that were passed over."""
        return map(Record.from_json, self.scan_json(masked, highest_first))

    def scan_json(
        self, masked: bool = False, highest_first: bool = False, read: Callable[[str], dict] | None = None
    ) -> Iterator[dict]:
        """`scan`, as JSON objects. read: in place of `read_json`."""
        self.broken, self.masked = [], 0
        for version in reversed(self.versions()) if highest_first else self.versions():
            try:
                record = (read or self.read_json)(version)
            except ToolError as error:  # broken, or removed since it was listed
                self.broken.append(str(error))
                continue
            if masked or not record["masked"]:
                yield record
            else:
                self.masked += 1

    def records(self, masked: bool = False) -> list[Record]:
        """All sound records, lowest version first; masked ones only when asked. `self.broken` names the others."""
        return list(self.scan(masked))

    def glance(self, names: tuple[str, ...], masked: bool = False) -> Iterator[dict]:
        """`records` of which only the version, `masked` and the fields `names` count: of SHORT, or one other.

        For printing alone: files that are as an earlier glance found them are not opened. What judges reads the
        records.
        """
        cached = SHORT if set(names) <= set(SHORT) else ("masked", *names)
        cache = RecordCache(self.glances / ("short" if cached is SHORT else names[0]), cached, self.folder)
        paths = [name.split(".") for name in cached]
        wanted = ("masked", *names)
        places = [cached.index(name) for name in wanted]

        def cut(version: str) -> dict:
            if (values := cache.get(version)) is not None:
                return joined(version, wanted, [values[place] for place in places])
            record = self.read_json(version)  # sound: it has these fields
            cache.put(version, [reduce(getitem, path, record) for path in paths])
            return record

        yield from self.scan_json(masked, read=cut)
        cache.save()

    def masked_versions(self) -> set[str]:
        """The sound records that are masked."""
        return {record.version for record in self.scan(masked=True) if record.masked}

    def history(self, name: str) -> list[dict]:
        """[{version, value}] of a field in the unmasked records, None where one lacks it; UsageError when all do."""
        found, lacking = [], []
        for record in self.glance((holder(name),)):
            try:
                value = field(record, name)
            except UsageError as error:
                value = None
                lacking.append(error)
            found.append({"version": record["version"], "value": value})
        if found and len(lacking) == len(found):
            raise lacking[0]
        return found

    def left_out(self) -> list[str]:
        """What the last scan did not serve: broken records and foreign files by name, masked records by their
        number."""
        stems = self._stems()
        foreign = [stem for stem in stems if not VERSION.match(stem) and stem != self.restarts.stem]
        named = [
            f"{self.folder / stem}.json is no record (records are v0.json, v1.json, …)" for stem in sorted(foreign)
        ]
        numbers = {_number(stem) for stem in stems if VERSION.match(stem)}
        if gaps := max(numbers, default=-1) + 1 - len(numbers):
            first = itertools.islice((f"v{n}" for n in itertools.count() if n not in numbers), min(gaps, 5))
            named.append(f"no record of {', '.join(first)}{' …' * (gaps > 5)}: the file is gone")
        masked = [f"{self.masked} masked record{'s' if self.masked > 1 else ''}"] if self.masked else []
        return [*self.broken, *named, *masked]

    def create(self, version: str) -> Record:
        """An empty record, written; Refused when the version has one."""
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
        """The JSON object of a record, to change in place: read and written under one lock, written only when the
        block ends well."""
        with self.locked():
            record = self.read_json(version)
            yield record
            self._write(record)

    def update(self, version: str, changes: dict[str, str]) -> dict:
        """Set fields, named by dotted path, from text; the schema decides each value's type.

        UsageError for what only the gate writes: a verdict or a measurement is never typed. Refused when it is masked.
        """
        with self.editing(version) as record:
            for name, text in changes.items():
                _check_free(record, name)
                _assign(record, name, text)
        return record

    def append(self, version: str, name: str, items: list[str]) -> dict:
        """Add items, each the text of a JSON value, to the list in the field `name`; refuses what `update` refuses."""
        with self.editing(version) as record:
            _check_free(record, name)
            found = field(record, name)
            if not isinstance(found, list):
                lists = ", ".join(key for key, value in record.items() if isinstance(value, list))
                raise UsageError(f"'{name}' is no list; lists are: {lists}")
            found += [_json(item, name, "JSON values") for item in items]
        return record

    def set_masked(self, versions: list[str], masked: bool) -> None:
        """Mask or unmask; nothing changes unless all versions exist.

        UsageError for masking v0 or the best version: planning starts from them.
        """
        with self.locked():
            records = [self.read(version) for version in versions]
            best = self.best() if masked else None
            for kept in ("v0", best.version if best else None):
                if masked and kept in versions:
                    raise UsageError(f"{kept} stays unmasked: planning starts from the baseline and the best version")
            for record in records:
                self.save(replace(record, masked=masked))

    def _write(self, record: dict) -> None:
        check(record, f"record {record['version']}")
        bundle.write_json(self.path(record["version"]), record)

    def best(self) -> Record | None:
        """The version to beat: the last accepted one. Each acceptance beat the one before in a paired
        measurement, so the last is the best; latencies recorded at different times are never compared.
        Masking hides a record from planning, not from this. UsageError when a later record is broken: it might be
        the best."""
        for version in reversed(self.versions()):
            if self._has_no_commit(version):
                continue
            try:
                record = self.read(version)
            except UsageError as error:
                raise UsageError(f"the best version cannot be told: {error}") from None
            if record.is_accepted:
                return record
        return None

    def _has_no_commit(self, version: str) -> bool:
        """Does its text say so? Thousands of refused rounds may follow the best one, and need not be read for that.
        In a string of a record the quotes would be escaped."""
        with contextlib.suppress(UsageError, OSError):  # `read` words what is wrong
            return b'"git_commit_hash": null' in bundle.read_bytes(self.path(version))
        return False

    def next_version(self) -> str:
        """One above the highest recorded version, masked or not."""
        versions = self.versions()
        return f"v{version_number(versions[-1]) + 1}" if versions else "v0"


def load(path: Path) -> dict:
    """The sound record in `path`; UsageError names the file and what is wrong with it."""
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
    """UsageError names the first field of `title` that does not fit the schema.

    escapes: the text that it was read from has some, which may stand for half a character that cannot be written.
    """
    bundle.validate(record, SCHEMA, title)
    if not escapes:
        return
    try:
        bundle.dumps(record).encode("utf-8")
    except ValueError as error:
        raise UsageError(f"{title} cannot be written as JSON ({error}); mend it") from None


def now() -> str:
    """The time in UTC, as records write it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def empty(version: str) -> Record:
    """A record of `version` in which nothing is known yet, made from the schema's own list of fields."""
    schema = bundle.read_json(bundle.REFERENCE / SCHEMA)
    return Record.from_json({**_blank(schema), "version": version, "masked": False, "timestamp": now()})


def _blank(schema: dict):
    if schema.get("type") == "object":
        return {name: _blank(schema["properties"][name]) for name in schema["required"]}
    return [] if schema.get("type") == "array" else None


def field(record: dict, name: str):
    """The value at a dotted path; UsageError names the part that does not exist."""
    value = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UsageError(f"'{name}' is no field of a record ('{part}' is not there)")
        value = value[part]
    return value


def holder(name: str) -> str:
    """The field that is in every record, at the top or one below, and holds what the dotted path `name` leads to;
    "masked" when none does."""
    fields = bundle.read_json(bundle.REFERENCE / SCHEMA)["properties"]
    top, second = [*name.split("."), ""][:2]
    if second in fields.get(top, {}).get("properties", {}):
        return f"{top}.{second}"
    return top if top in fields else "masked"


def joined(version: str, names: tuple[str, ...], values: list) -> dict:
    """A record of these fields alone, dotted paths of at most two parts."""
    record: dict = {"version": version}
    for name, value in zip(names, values, strict=True):
        top, _, second = name.partition(".")
        if second:
            record.setdefault(top, {})[second] = value
        else:
            record[top] = value
    return record


def differences(before: dict, after: dict, path: str = "") -> list[dict]:
    """The fields in which two records differ, in their order: {field, from, to}, of the record's own lists {field,
    removed, added}.

    A field that only one side has (a workload, say) is None on the other. What differs by nature (version, timestamp)
    is left out. Latencies stand side by side and are not divided: only a paired comparison tells a speed-up.
    """
    found = []
    for name in [*before, *(name for name in after if name not in before)]:
        old, new, where = before.get(name), after.get(name), f"{path}{name}"
        if old == new or where in ("version", "timestamp"):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{where}.")
        elif isinstance(old, list) and not path:
            found.append({"field": where, "removed": _without(old, new), "added": _without(new, old)})
        else:
            found.append({"field": where, "from": old, "to": new})
    return found


def _without(items: list, others: list) -> list:
    """`items`, less one for each of `others` that it holds."""
    left = list(items)
    for other in others:
        if other in left:
            left.remove(other)
    return left


def _number(version: str) -> int:
    """`version_number` of what is known to be a version."""
    return int(version[1:])


def _check_free(record: dict, name: str) -> None:
    """Refused when the record is masked, UsageError when the field is not for its author to write."""
    if record["masked"]:
        raise Refused(f"{record['version']} is masked: discarded memory; unmask takes it back")
    judged = record["quality_gate"]["result"] is not None
    if name.split(".")[0] in (*GATE_FIELDS, *(MEASURED_FIELDS if judged else ())):
        raise UsageError(f"{name} is written by run_gate.py, from what it measured")
    if name == "masked":
        raise UsageError("the verbs mask and unmask change that")


def _assign(record: dict, name: str, text: str) -> None:
    """Put `text` into the field `name`, as the type that the schema gives that field."""
    field(record, name)
    schema = bundle.read_json(bundle.REFERENCE / SCHEMA)
    holder = record
    *parents, last = name.split(".")
    for part in parents:
        schema, holder = schema["properties"][part], holder[part]
        if "properties" not in schema:
            raise UsageError(f"'{name}': set the whole of '{part}', as JSON")
    holder[last] = _typed(schema["properties"][last], text, name)


def _typed(schema: dict, text: str, name: str):
    _check_text(text, name)
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if text == "null" and ("null" in types or None in schema.get("enum", []) or "oneOf" in schema):
        return None
    if "string" in types or "enum" in schema:
        return text
    return _json(text, name, " or ".join(types) or "JSON")


def _json(text: str, name: str, wanted: str):
    try:
        value = bundle.loads(text)
    except ValueError:
        raise UsageError(f"'{name}' takes {wanted}, not '{text}'") from None
    _check_text(bundle.dumps(value), name)
    return value


def _check_text(text: str, name: str) -> None:
    """UsageError for half a character, which cannot be written."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"'{name}': the value is not UTF-8 text") from None
