"""Where the bundle lies, what it needs installed, and the JSON files it reads and writes."""

import importlib.util
import json
import math
import os
from pathlib import Path

from .errors import EnvironmentLacks, UsageError

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "reference"


def python_path() -> str:
    """PYTHONPATH for a child process: this bundle's tools, then what the caller has there."""
    return os.pathsep.join([str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])])


def require(*packages: str, group: str = "") -> None:
    """EnvironmentLacks when a package cannot be imported; none of them is imported here. group: of pyproject.toml."""
    if lacking := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise EnvironmentLacks(f"not installed: {', '.join(lacking)}; run: bash scripts/setup.sh {group}".rstrip())


def finite(word: str) -> float:
    """ValueError for NaN, Infinity and 1e999."""
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word} is no JSON number")
    return value


FINITE = json.JSONDecoder(parse_constant=finite, parse_float=finite)


def loads(text: str):
    """The JSON value of `text`; ValueError also for NaN, Infinity and 1e999, which cannot be written as JSON again."""
    return FINITE.decode(text)


def dumps(value) -> str:
    """JSON text, refusing NaN and Infinity, which no other JSON reader accepts."""
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def read_json(path: Path):
    """The JSON value in `path`; UsageError names the file when it is absent or broken."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid JSON ({error}); mend or remove it") from None


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


def validate(value, schema_name: str, what: str) -> None:
    """Check `value` against `reference/<schema_name>` (JSON Schema, draft 2020-12).

    UsageError names the first offending field of `what`.
    """
    require("jsonschema")
    import jsonschema

    schema = read_json(REFERENCE / schema_name)
    validator = jsonschema.Draft202012Validator(schema)
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is not None:
        field = ".".join(str(part) for part in error.absolute_path) or "top level"
        raise UsageError(f"{what}: {field}: {error.message}")
