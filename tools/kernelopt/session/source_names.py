"""The names that a Python file defines at top level, read without running it, and whether they make it a kernel or a
reference."""

import ast
from collections.abc import Iterator
from pathlib import Path

from ..errors import UsageError


def defined_names(path: Path) -> set[str]:
    """Return the names that a Python file defines or imports at top level. Raise UsageError if it is not a Python
    file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"{path} is not a readable file") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not valid Python ({error})") from None
    return names_in(tree)


def names_in(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    """Each name that a module assigns a value to at top level, with the statement, in their order."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def is_kernel(names: set[str]) -> bool:
    return bool(names & {"ModelNew", "kernel_function"})


def is_reference(names: set[str]) -> bool:
    return {"Model", "get_inputs"} <= names
