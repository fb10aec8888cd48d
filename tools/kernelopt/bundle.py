"""Where the bundle lies, what it needs installed, the JSON files it reads and writes, and folders of one user."""

import contextlib
import functools
import importlib.util
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from . import packages
from .errors import EnvironmentLacks, UsageError

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "reference"
MOST_DIGITS = 300  # of an integer: a float holds 308
MIRROR = "KERNELOPT_MIRROR"  # the folder below which another machine's files lie (remote/mirrors.py)


def python_path() -> str:
    """PYTHONPATH for a child process: this bundle's tools, then what the caller has there."""
    return os.pathsep.join([str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextlib.contextmanager
def mirrored(folder: Path) -> Iterator[None]:
    """Have `here` look for another machine's files below `folder`."""
    os.environ[MIRROR] = str(folder)
    try:
        yield
    finally:
        del os.environ[MIRROR]


def here(path: Path) -> Path:
    """Where a path lies that a file of the workspace names: in a mirror of another machine, below the mirror."""
    mirrored = Path(os.environ.get(MIRROR, "") + str(path))
    return mirrored if not path.exists() and mirrored.exists() else path


def require(*names: str, group: str = "") -> None:
    """EnvironmentLacks when a package cannot be imported, or is too old (packages.unfit); none of them is imported
    here. group: of pyproject.toml."""
    if lacking := [name for name in names if importlib.util.find_spec(name) is None]:
        raise EnvironmentLacks(f"not installed: {', '.join(lacking)}; run: bash scripts/setup.sh {group}".rstrip())
    for reason in filter(None, map(packages.unfit, names)):
        raise EnvironmentLacks(reason)


def finite(word: str) -> float:
    """ValueError for NaN, Infinity and 1e999."""
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word} is no JSON number")
    return value


def whole(word: str) -> int:
    """ValueError for an integer that is too large for a float, since with those we count."""
    if len(word) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(word)} digits is too large")
    return int(word)


FINITE = json.JSONDecoder(parse_constant=finite, parse_float=finite, parse_int=whole)


def loads(text: str):
    """The JSON value of `text`; ValueError also for NaN, Infinity and 1e999, which cannot be written as JSON again, for
    integers of more than MOST_DIGITS and for what is nested too deeply."""
    try:
        return FINITE.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dumps(value) -> str:
    """JSON text, refusing NaN and Infinity, which no other JSON reader accepts."""
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def read_bytes(path: Path) -> bytes:
    """What is in a file; UsageError when it is not there, or no plain file: a pipe would be waited for."""
    if not path.is_file():
        raise UsageError(f"{path} is no file; remove it" if path.exists() else f"{path} does not exist")
    return path.read_bytes()


def read_json(path: Path):
    """The JSON value in `path`; UsageError names the file when it is absent or broken."""
    try:
        return loads(read_bytes(path).decode("utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}); mend or remove it") from None


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """A handle of `path` to lock, made where it is not there and never written; UsageError when something else has
    that name."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UsageError(f"{path} is no plain file; remove it") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UsageError(f"{path} is no plain file; remove it")
        yield handle
    finally:
        os.close(handle)


def private_folder(folder: Path) -> Path:
    """Make the folder, closed to other users, and return it. EnvironmentLacks when others may use what is there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise EnvironmentLacks(f"{folder} is not a folder of yours alone; remove it, or set TMPDIR to another folder")
    return folder


def is_private(folder: Path) -> bool:
    """Whether this is a folder of this user, closed to others."""
    status = folder.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077  # links have all rights


def write_text(path: Path, text: str) -> None:
    """Replace `path` in one step (see `write_bytes`)."""
    write_bytes(path, text.encode("utf-8", "replace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` in one step: a reader sees the old content or the new one, never a part."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value) -> None:
    """Write `value` to `path` in one step (see `write_bytes`)."""
    write_text(path, dumps(value))


@functools.cache
def validator(schema_name: str):
    """The compiled validator of `reference/<schema_name>` (JSON Schema, draft 2020-12)."""
    require("jsonschema_rs")
    import jsonschema_rs

    return jsonschema_rs.Draft202012Validator(read_json(REFERENCE / schema_name))


def validate(value, schema_name: str, title: str) -> None:
    """Check `value` against `reference/<schema_name>`; UsageError names the first offending field of `title`."""
    rules = validator(schema_name)
    try:
        sound = rules.is_valid(value)
    except (UnicodeEncodeError, SystemError):  # SystemError: from jsonschema-rs 0.41
        # Half a character, which the validator cannot read and no schema speaks of.
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        sound = rules.is_valid(value)
    if sound:
        return
    error = innermost(min(rules.iter_errors(value), key=lambda error: len(error.instance_path)))
    field = ".".join(map(str, error.instance_path)) or "top level"
    raise UsageError(f"{title}: {field}: {schema_message(error)}")


def innermost(error):
    """The cause of a validation error: where no alternative fits, the error deepest in the value, of the nearest
    one."""
    while error.kind.name in ("oneOf", "anyOf"):
        error = max((cause for branch in error.kind.context for cause in branch), key=lambda e: len(e.instance_path))
    return error


def schema_message(error) -> str:
    """What a validation error says, with all allowed values of an enum, which the library cuts off."""
    if error.kind.name != "enum":
        return error.message
    allowed = ", ".join(json.dumps(value) for value in error.kind.options)
    return f"{json.dumps(error.instance)} is not one of {allowed}"
