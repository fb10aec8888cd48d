"""Code of a source as text: what a task needs of it, and the places that are changed. Nothing of it is run.

Source("…", "reference.py")     a module, its syntax tree and the positions of its nodes
assembled(main, modules, roots) the text of what the functions `roots` need, out of several modules
edits.py                        the changes
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import UsageError
from .files import python_tree

COMMENT = re.compile(rb"[ \t]*#[^\n]*")
BLOCKS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
COMMENT_LINES = re.compile(rb"(?:^#[^\n]*\n)+\Z", re.MULTILINE)


@dataclass(frozen=True)
class Edit:
    """New text in place of the bytes from start to end."""

    start: int
    end: int
    text: str


@dataclass
class Source:
    """A module of Python. where: its name for messages. edits: changes that `piece` applies."""

    text: str
    where: str
    edits: list[Edit] = field(default_factory=list)

    def __post_init__(self):
        self.tree = python_tree(self.text, self.where)
        self.bytes = self.text.encode()
        self._lines = [0]
        for line in self.bytes.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)

    def start(self, node: ast.AST) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def replace(self, node: ast.AST, text: str) -> None:
        self.edits.append(Edit(self.start(node), self.end(node), text))

    def piece(self, start: int, end: int) -> str:
        """The text between two places, with the edits in it. Of edits that overlap the first holds."""
        parts, at = [], start
        for edit in sorted(self.edits, key=lambda edit: (edit.start, edit.end)):
            if at <= edit.start and edit.end <= end:
                parts += [self.bytes[at : edit.start], edit.text.encode()]
                at = edit.end
        return b"".join([*parts, self.bytes[at:end]]).decode()

    def statement(self, node: ast.stmt) -> str:
        """A statement of the module with its decorators, and the comments above it and behind it."""
        start = min([self.start(node), *(self.start(one) - 1 for one in getattr(node, "decorator_list", []))])
        above = COMMENT_LINES.search(self.bytes, 0, start)
        behind = COMMENT.match(self.bytes, self.end(node))
        return self.piece(above.start() if above else start, behind.end() if behind else self.end(node))


def defined(tree: ast.Module) -> set[str]:
    """The names that a module binds."""
    return {name for node in tree.body for name in bound(node)}


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement of a module binds there."""
    if isinstance(node, BLOCKS):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    within = {one for part in ast.walk(node) if isinstance(part, ast.comprehension) for one in ast.walk(part.target)}
    stored = [one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    names = {one.id for one in stored if one not in within}
    inner = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt | ast.ExceptHandler)]
    return names.union(*(bound(one) for one in inner))


def used(node: ast.stmt) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def needed_statements(tree: ast.Module, roots: set[str]) -> list[ast.stmt]:
    """The statements that the names `roots` need, and those that change something else than names."""
    wanted, chosen = set(roots), []
    while new := [one for one in tree.body if one not in chosen and (has_effect(one) or bound(one) & wanted)]:
        chosen += new
        wanted |= set().union(*map(used, new))
    return [node for node in tree.body if node in chosen]


def has_effect(node: ast.stmt) -> bool:
    """Does a statement do something besides binding names? Docstrings and `if __name__ == "__main__"` do not count."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return False
    if isinstance(node, ast.If) and "__name__" in used(ast.Expr(node.test)):
        return False
    if is_star(node):
        return True
    return not bound(node) and not isinstance(node, ast.Pass)


def is_star(node: ast.stmt) -> bool:
    """from module import *"""
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def assembled(main: Source, modules: dict[str, Source], roots: set[str]) -> str:
    """The text that the functions `roots` of `main` need. `from MODULE import name` of one of the `modules` is replaced
    by what it names. UsageError for other ways to import them, and where two of them define one name."""
    text, owners, seen = "", {}, {"import torch", "import torch.nn as nn"}
    for source, names in in_order(main, modules, roots):
        for node in needed_statements(source.tree, names):
            piece = with_imports(source, node, modules)
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            if not piece or (is_import and piece in seen):
                continue
            for name in () if is_import else bound(node):
                if owners.setdefault(name, source) is not source:
                    raise UsageError(f"{source.where} and {owners[name].where} both define {name}; rename one of them")
            seen.add(piece)
            block = isinstance(node, BLOCKS)
            text = text.rstrip("\n") + ("\n\n\n" if block and text else "\n") + piece + "\n\n\n" * block
    return text.strip("\n") + "\n"


def in_order(main: Source, modules: dict[str, Source], roots: set[str]) -> Iterator[tuple[Source, set[str]]]:
    """The modules that are needed and the names that are needed of each, `main` last."""
    needed: dict[str, set[str]] = {}
    pending = [(main, roots)]
    while pending:
        source, names = pending.pop()
        nodes = needed_statements(source.tree, names)
        words = roots.union(*(used(node) for node in nodes))
        for node in nodes:
            for module, more in imported(source, node, modules, words).items():
                if not more <= needed.get(module, set()):
                    needed[module] = needed.pop(module, set()) | more  # before those that need it
                    pending.append((modules[module], needed[module]))
    yield from ((modules[module], names) for module, names in reversed(needed.items()))
    yield main, roots


def imported(source: Source, node: ast.stmt, modules: dict[str, Source], words: set[str]) -> dict[str, set[str]]:
    """The names that a statement imports, by the module of ours. words: that the code uses."""
    if isinstance(node, ast.Import) and (whole := [alias.name for alias in node.names if alias.name in modules]):
        raise UsageError(f"{source.where} imports {whole[0]} as a whole; write: from {whole[0]} import NAME, …")
    if not isinstance(node, ast.ImportFrom) or node.module not in modules:
        return {}
    if is_star(node):
        return {node.module: defined(modules[node.module].tree) & words}
    names = {alias.name for alias in node.names if (alias.asname or alias.name) in words}
    if lacking := names - defined(modules[node.module].tree):
        raise UsageError(f"{source.where} imports {min(lacking)}, which {modules[node.module].where} does not define")
    return {node.module: names} if names else {}


def with_imports(source: Source, node: ast.stmt, modules: dict[str, Source]) -> str:
    """The text of a statement; of an import of one of our modules only its new names."""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return ""
    if isinstance(node, ast.ImportFrom) and node.module in modules:
        return "\n".join(f"{one.asname} = {one.name}" for one in node.names if one.asname not in (None, one.name))
    return source.statement(node)


def function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """The function of that name that a module defines."""
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def parameters(node: ast.FunctionDef) -> list[str]:
    """The names of a function's positional parameters."""
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]


def dotted(node: ast.AST) -> str:
    """ "torch.cuda.manual_seed" of such an expression; "" of any other."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner else ""
