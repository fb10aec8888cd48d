"""The records of a session: one JSON file a version, `memory/vN.json` (`reference/v_iteration.schema.json`)."""

import contextlib
import datetime
import fcntl
from pathlib import Path

from . import bundle
from .errors import Refused, UsageError
from .workspace import VERSION, Workspace, version_number

SCHEMA = "v_iteration.schema.json"
GATE_FIELDS = ("version", "quality_gate", "kernel_sha256", "git_commit_hash")  # run_gate.py alone writes them
MEASURED_FIELDS = ("performance", "correctness", "device", "timestamp")  # and these, once it has judged


class Memory:
    """All records of one workspace. Every write is checked against the schema, atomic and under one lock."""

    def __init__(self, workspace: Workspace):
        self.folder = workspace.memory
        self.broken: list[str] = []

    def path(self, version: str) -> Path:
        version_number(version)
        return self.folder / f"{version}.json"

    @contextlib.contextmanager
    def _locked(self):
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def versions(self) -> list[str]:
        """Recorded versions, lowest first. Files that are no `vN.json` are nobody's business here."""
        names = [path.stem for path in self.folder.glob("v*.json")]
        return sorted((name for name in names if VERSION.match(name)), key=version_number)

    def read(self, version: str) -> dict:
        """One record; Refused when there is none, UsageError when it is broken."""
        path = self.path(version)
        if not path.exists():
            raise Refused(f"{version} is not recorded; recorded: {', '.join(self.versions()) or 'none'}")
        record = bundle.read_json(path)
        bundle.validate(record, SCHEMA, str(path))
        return record

    def records(self, masked: bool = False) -> list[dict]:
        """All sound records, lowest version first; masked ones only when asked. `self.broken` names the others."""
        found, self.broken = [], []
        for version in self.versions():
            try:
                found.append(self.read(version))
            except UsageError as error:
                self.broken.append(str(error))
        return [record for record in found if masked or not record["masked"]]

    def create(self, version: str) -> dict:
        """An empty record; Refused when the version has one."""
        with self._locked():
            if self.path(version).exists():
                raise Refused(f"{version} is recorded already; change it with: update --version {version} --set …")
            record = empty(version)
            self._write(record)
        return record

    def save(self, record: dict) -> None:
        """Write a whole record."""
        with self._locked():
            self._write(record)

    def update(self, version: str, changes: dict[str, str]) -> dict:
        """Set fields, named by dotted path, from text; the schema decides each value's type.

        UsageError for what only the gate writes: a verdict or a measurement is never typed.
        """
        with self._locked():
            record = self.read(version)
            judged = record["quality_gate"]["result"] is not None
            for name, text in changes.items():
                if name.split(".")[0] in (*GATE_FIELDS, *(MEASURED_FIELDS if judged else ())):
                    raise UsageError(f"{name} is written by run_gate.py, from what it measured")
                if name == "masked":
                    raise UsageError("the verbs mask and unmask change that")
                _assign(record, name, text)
            self._write(record)
        return record

    def set_masked(self, versions: list[str], masked: bool) -> None:
        """Mask or unmask; nothing changes unless all versions exist.

        UsageError for masking v0 or the best version: planning starts from them.
        """
        with self._locked():
            records = [self.read(version) for version in versions]
            best = self.best() if masked else None
            for kept in ("v0", best["version"] if best else None):
                if masked and kept in versions:
                    raise UsageError(f"{kept} stays unmasked: planning starts from the baseline and the best version")
            for record in records:
                self._write({**record, "masked": masked})

    def _write(self, record: dict) -> None:
        path = self.path(record["version"])
        bundle.validate(record, SCHEMA, f"record {record['version']}")
        bundle.write_json(path, record)

    def best(self) -> dict | None:
        """The version to beat: the last accepted one. Each acceptance beat the one before in a paired
        measurement, so the last is the best; latencies recorded at different times are never compared.
        Masking hides a record from planning, not from this. UsageError when a record is broken: it might be
        the best."""
        records = self.records(masked=True)
        if self.broken:
            raise UsageError(f"the best version cannot be told: {self.broken[0]}")
        accepted = [r for r in records if r["quality_gate"]["result"] == "PASS" and r["git_commit_hash"]]
        return accepted[-1] if accepted else None

    def next_version(self) -> str:
        """One above the highest recorded version, masked or not."""
        versions = self.versions()
        return f"v{version_number(versions[-1]) + 1}" if versions else "v0"


def now() -> str:
    """The time in UTC, as records write it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def empty(version: str) -> dict:
    """A record of `version` in which nothing is known yet, made from the schema's own list of fields."""
    schema = bundle.read_json(bundle.REFERENCE / SCHEMA)
    return {**_blank(schema), "version": version, "masked": False, "timestamp": now()}


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
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if text == "null" and ("null" in types or None in schema.get("enum", []) or "oneOf" in schema):
        return None
    if "string" in types or "enum" in schema:
        return text
    try:
        return bundle.loads(text)
    except ValueError:
        raise UsageError(f"'{name}' takes {' or '.join(types) or 'JSON'}, not '{text}'") from None
