"""The candidates of an exploration: files, the files of a folder, or one file with a SPACE of constants."""

import ast
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..session.workspace import defined_names, is_kernel

MOST = 512  # candidates of one exploration
SPACE = "SPACE"
Constants = dict[str, object]  # of a configuration: the value of each, by name


@dataclass(frozen=True)
class Candidate:
    """One variant. name: the file's stem, with its constants in brackets for a configuration. source: the text that
    runs."""

    name: str
    config: Constants
    source: str


def from_paths(paths: list[Path]) -> list[Candidate]:
    """The candidates of the files and folders; UsageError says which cannot be one."""
    files = [file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
    candidates = [candidate for file in files for candidate in of_file(file)]
    if not candidates:
        raise UsageError(
            f"no candidate in {', '.join(map(str, paths))}: pass .py files with ModelNew or kernel_function"
        )
    if len(candidates) > MOST:
        raise UsageError(f"{len(candidates)} candidates are more than {MOST}; make the SPACE smaller")
    names = [candidate.name for candidate in candidates]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two candidates have the name {twice}; rename a file, or remove a repeated configuration")
    return candidates


def of_file(file: Path) -> list[Candidate]:
    """One candidate, or one per configuration of the file's SPACE."""
    if not is_kernel(defined_names(file)):
        raise UsageError(f"{file} is no kernel: it must define ModelNew or kernel_function")
    source = file.read_text(encoding="utf-8")
    configs = space_of(source, file)
    if configs is None:
        return [Candidate(file.stem, {}, source)]
    return [Candidate(name_of(file.stem, config), config, with_constants(source, config, file)) for config in configs]


def name_of(stem: str, config: Constants) -> str:
    """space[BLOCK=64,WARPS=4]; on one line, whatever the values are."""
    shown = {name: str(value) if str(value).isprintable() else repr(value) for name, value in config.items()}
    constants = ",".join(f"{name}={value}" for name, value in shown.items())
    return f"{stem}[{constants}]"


def space_of(source: str, file: Path) -> list[Constants] | None:
    """The configurations of a module-level SPACE, a literal: a list of dicts, or a dict of lists, which means their
    product."""
    assigned = assignments(source).get(SPACE)
    if assigned is None:
        return None
    try:
        space = ast.literal_eval(assigned.value)
    except ValueError:
        raise UsageError(f"{file}: SPACE must be a literal: a list of dicts, or a dict of lists") from None
    if (
        isinstance(space, dict)
        and space
        and all(isinstance(values, list | tuple) and values for values in space.values())
    ):
        return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    if isinstance(space, list | tuple) and space and all(isinstance(config, dict) and config for config in space):
        return list(space)
    raise UsageError(f"{file}: SPACE must be a list of dicts, or a dict of lists, and not empty")


def assignments(source: str) -> dict[str, ast.Assign | ast.AnnAssign]:
    """The last top-level assignment to each name of a module that is assigned on its own."""
    assigned: dict[str, ast.Assign | ast.AnnAssign] = {}
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and node.value is not None:
            assigned[targets[0].id] = node
    return assigned


def with_constants(source: str, config: Constants, file: Path) -> str:
    """The source with the constants of a configuration in place of the module's, and without its SPACE."""
    known, text = assignments(source), source.encode()
    starts = [0, *(at + 1 for at, byte in enumerate(text) if byte == ord("\n"))]
    edits = {removed(text, *span_of(known[SPACE], starts))}
    for name, value in config.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name)) or name not in known or name == SPACE:
            raise UsageError(
                f"{file}: SPACE names {name}, which the module does not assign at its top level on its own, "
                f"as {name} = …"
            )
        edits.add((*span_of(constant_of(known[name].value), starts), repr(value).encode()))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text.decode()


def constant_of(value: ast.expr) -> ast.expr:
    """The constant in an assigned value: 128 in tl.constexpr(128), which stays a constexpr."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("constexpr") and len(value.args) == 1:
        return value.args[0]
    return value


def span_of(node: ast.stmt | ast.expr, starts: list[int]) -> tuple[int, int]:
    """Where a node begins and ends, in bytes. starts: of the lines."""
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def removed(text: bytes, start: int, end: int) -> tuple[int, int, bytes]:
    """(begin, end, new text) to remove a statement: with its lines, unless another one stands there."""
    first, last = text.rfind(b"\n", 0, start) + 1, text.find(b"\n", end) + 1 or len(text)
    if text[first:start].strip() or not re.fullmatch(rb"\s*(#.*)?\s*", text[end:last]):
        return start, end, b"pass"
    return first, last, b""
