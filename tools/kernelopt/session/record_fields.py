"""The fields of a record, named by dotted path: read one, set one from text, compare those of two records."""

from collections.abc import Iterator
from dataclasses import dataclass

from .. import bundle
from ..errors import UsageError
from .record import Record

SCHEMA = "v_iteration.schema.json"


@dataclass(frozen=True)
class FieldValue:
    """The value of a field, any JSON value, in the record of one version."""

    version: str
    value: object

    def to_json(self) -> dict:
        return dict(vars(self))


@dataclass(frozen=True)
class FieldChange:
    """A field, named by dotted path, with different values in two records."""

    field: str
    old: object
    new: object

    def to_json(self) -> dict:
        return {"field": self.field, "from": self.old, "to": self.new}

    @property
    def removed(self) -> list:
        return [self.old]

    @property
    def added(self) -> list:
        return [self.new]


@dataclass(frozen=True)
class ListChange:
    """A list of two records, and the items that only the first or only the second has."""

    field: str
    removed: list
    added: list

    def to_json(self) -> dict:
        return dict(vars(self))


def field(record: dict, name: str):
    """Return the value at a dotted path. The UsageError names the part that does not exist."""
    value = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UsageError(f"'{name}' is no field of a record ('{part}' is not there)")
        value = value[part]
    return value


def holder(name: str) -> str:
    """Return the field that holds the value at the dotted path `name`. The field is in every record, at the top
    level or one below. Return "masked" if there is no such field."""
    fields = bundle.read_json(bundle.REFERENCE / SCHEMA)["properties"]
    top, second = [*name.split("."), ""][:2]
    if second in fields.get(top, {}).get("properties", {}):
        return f"{top}.{second}"
    return top if top in fields else "masked"


def joined(version: str, names: tuple[str, ...], values: list) -> dict:
    """Make a record of only these fields. The names are dotted paths of at most two parts."""
    record: dict = {"version": version}
    for name, value in zip(names, values, strict=True):
        top, _, second = name.partition(".")
        if second:
            record.setdefault(top, {})[second] = value
        else:
            record[top] = value
    return record


def differences(before: Record, after: Record) -> list[FieldChange | ListChange]:
    """Return the fields in which two records differ, in order.

    A field on only one side, such as a workload, is None on the other. Fields that always differ (version, timestamp)
    are left out. Latencies are listed without a ratio, because only a paired comparison measures a speed-up.
    """
    return list(_differences(before.to_json(), after.to_json()))


def _differences(before: dict, after: dict, path: str = "") -> Iterator[FieldChange | ListChange]:
    for name in [*before, *(name for name in after if name not in before)]:
        old, new, where = before.get(name), after.get(name), f"{path}{name}"
        if old == new or where in ("version", "timestamp"):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{where}.")
        elif isinstance(old, list) and not path:
            yield ListChange(where, _without(old, new), _without(new, old))
        else:
            yield FieldChange(where, old, new)


def _without(items: list, others: list) -> list:
    """Return `items` without one occurrence of each of `others`."""
    left = list(items)
    for other in others:
        if other in left:
            left.remove(other)
    return left


def assign(record: dict, name: str, text: str) -> None:
    """Convert `text` to the type that the schema gives to the field `name`, and set the field."""
    field(record, name)
    schema = bundle.read_json(bundle.REFERENCE / SCHEMA)
    owner = record
    *parents, last = name.split(".")
    for part in parents:
        schema, owner = schema["properties"][part], owner[part]
        if "properties" not in schema:
            raise UsageError(f"'{name}': set the whole of '{part}', as JSON")
    owner[last] = _typed(schema["properties"][last], text, name)


def _typed(schema: dict, text: str, name: str):
    _check_text(text, name)
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if text == "null" and ("null" in types or None in schema.get("enum", []) or "oneOf" in schema):
        return None
    if "string" in types or "enum" in schema:
        return text
    return json_value(text, name, " or ".join(types) or "JSON")


def json_value(text: str, name: str, wanted: str):
    """Return the JSON value of `text`, meant for the field `name`. The UsageError says what is `wanted`."""
    try:
        value = bundle.loads(text)
    except ValueError:
        raise UsageError(f"'{name}' takes {wanted}, not '{text}'") from None
    _check_text(bundle.dumps(value), name)
    return value


def _check_text(text: str, name: str) -> None:
    """Raise UsageError for a lone surrogate, which cannot be written."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"'{name}': the value is not UTF-8 text") from None
