"""The changes to the code of a source, so that it works as a reference:

with_every_seed   a fixed seed is left out, so that each seed gives other inputs
renamed           a name that the reference needs itself gets another one
with_sizes        module-level sizes become keyword arguments of the functions that read them
"""

import ast
import re
import symtable
from collections.abc import Iterable

from .source_code import Edit, Source, defined, dotted, function

SEEDING = (
    *("torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "random.seed"),
    *("np.random.seed", "numpy.random.seed"),
)
END_OF_ARGUMENTS = re.compile(rb"([\s,)]*)\)\s*(?:->|:)")  # after the last one: what closes it, and the list
CALLED_BY_A_KERNEL_TOO = ("forward", "run", "ref_kernel")


def with_every_seed(source: Source) -> bool:
    """Leave out each fixed seed of the code that makes inputs and parameters. True where there was any."""
    before = len(source.edits)
    own = defined(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.name not in CALLED_BY_A_KERNEL_TOO:
            for one in ast.walk(node):
                leave_out_seed(source, one, own)
    for node in source.tree.body:
        leave_out_seed(source, node, own)
    return len(source.edits) > before


def leave_out_seed(source: Source, node: ast.AST, own: set[str]) -> None:
    """own: names of the module. A seed that depends on an argument stays."""
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call) or not call.args or any(depends_on_seed(one, own) for one in call.args):
        return
    if isinstance(node, ast.Expr) and dotted(call.func) in SEEDING:
        source.replace(node, "pass")
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "manual_seed" and dotted(call.func) not in SEEDING:
        source.replace(call.args[0], "torch.initial_seed()")


def depends_on_seed(node: ast.AST, own: set[str]) -> bool:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return any("seed" in name.lower() for name in names - own)


def renamed(source: Source, reserved: Iterable[str]) -> list[str]:
    """Give those of the reserved names that the module defines itself another name, and return them."""
    taken = sorted(defined(source.tree) & set(reserved))
    for name in taken:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name) and node.id == name:
                source.replace(node, new_name(name))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                place = re.compile(rb"\b" + name.encode() + rb"\b").search(source.bytes, source.start(node))
                source.edits.append(Edit(place.start(), place.end(), new_name(name)))
    return taken


def new_name(name: str) -> str:
    return f"{name}_of_source"


def with_sizes(source: Source, name: str, sizes: dict[str, int]) -> None:
    """Give a function of the module these keyword arguments, which hide the module's names in it."""
    node = function(source.tree, name)
    keywords = ", ".join(f"{size}={value}" for size, value in sizes.items())
    given = node.args
    parts = [*given.posonlyargs, *given.args, *given.defaults, *given.kwonlyargs, *filter(None, given.kw_defaults)]
    if parts:
        last = max(map(source.end, parts))
        rest = END_OF_ARGUMENTS.match(source.bytes, last)
        at = last + len(rest[1].rstrip(b" \t\n,")) if rest else last
        text = f", {keywords}" if given.kwonlyargs else f", *, {keywords}"
    else:
        at = source.bytes.index(b"(", source.start(node)) + 1
        text = f"*, {keywords}"
    source.edits.append(Edit(at, at, text))


def readers(source: Source, names: set[str]) -> dict[str, set[str]]:
    """The functions and classes at the top of a module that read any of its own `names`, and which."""

    def read(table: symtable.SymbolTable) -> set[str]:
        own = {one.get_name() for one in table.get_symbols() if one.is_global() and one.is_referenced()}
        return own.union(*map(read, table.get_children())) & names

    top = symtable.symtable(source.text, source.where, "exec")
    by_name = {child.get_name(): read(child) for child in top.get_children()}
    return {name: own for name, own in by_name.items() if own}
