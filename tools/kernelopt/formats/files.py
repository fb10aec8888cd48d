"""Reading the files of a source. Every fault is a UsageError of one sentence; nothing of them is run."""

import ast
import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path

from ..errors import EnvironmentLacks, UsageError
from ..session.source_names import assigned

MOST_BYTES = 32 << 20
MOST_YAML_BYTES = 1 << 20  # its reader in Python takes a minute for ten times as much
TOO_DEEP = (RecursionError, MemoryError)


def text_of(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file, its line ends as a newline."""
    try:
        if not path.is_file():
            raise UsageError(f"{path} is not a file")
        if path.stat().st_size > most_bytes:
            raise UsageError(f"{path} is larger than {most_bytes >> 20} MiB, too large for a task")
        return path.read_text(encoding="utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def json_object(path: Path) -> dict:
    """The JSON object in a file."""
    return parsed_object(text_of(path), str(path))


def json_lines(path: Path) -> Iterator[dict]:
    """The JSON objects in a file, one a line."""
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if line.strip():
            yield parsed_object(line, f"{path}, line {number}")


def parsed_object(text: str, where: str) -> dict:
    try:
        value = json.loads(text)
    except (ValueError, *TOO_DEEP) as error:
        raise UsageError(f"{where} is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where} holds no JSON object")
    return value


def yaml_object(path: Path) -> dict:
    """The mapping in a YAML file."""
    text = text_of(path, MOST_YAML_BYTES)
    try:
        import yaml
    except ImportError:
        raise EnvironmentLacks(
            f"{path} is YAML, and PyYAML is not installed; run: bash scripts/setup.sh formats"
        ) from None
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, *TOO_DEEP) as error:
        raise UsageError(f"{path} is not valid YAML: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds no mapping of keys to values")
    return value


def python_tree(text: str, where: str) -> ast.Module:
    """The syntax tree of Python code."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, *TOO_DEEP) as error:
        raise UsageError(f"{where} is not valid Python: {one_line(error)}") from None


def literal(tree: ast.Module, name: str, where: str):
    """The value that a module assigns to a name last, written out in it, or with names that it assigns values to."""
    values = {name: node.value for name, node in assigned(tree)}
    if name not in values:
        raise UsageError(f"{where} does not assign {name}")
    with contextlib.suppress(ValueError, TypeError, *TOO_DEEP):
        return ast.literal_eval(Named(values).visit(copy.deepcopy(values[name])))
    raise UsageError(f"{where} computes {name}; write its value out")


class Named(ast.NodeTransformer):
    """Puts what names were assigned in their places."""

    def __init__(self, assigned: dict[str, ast.expr]):
        self._assigned = assigned

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._assigned.get(node.id, node)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
