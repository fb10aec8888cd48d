"""The candidates of an exploration: files, the files of a folder, or one file with a SPACE of constants."""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError
from ..session.source_names import assigned, is_kernel, names_in

MOST = 512  # candidates of one exploration
MOST_CHARACTERS = 60  # of a name in a table
LEAST_OF_STEM = 9  # of them, where the constants are long
SPACE = "SPACE"
PROBE = "PROBE"  # a module-level constant
KINDS_OF_SPACE = "it must be a literal: a list of dicts, or a dict of lists"
TORCH_HEADER = re.compile(r"#include\s*[<\"](torch|ATen|c10)/")
LOADS_FILES = re.compile(r"(?<!\btl\.)\bload\(")
NO_KERNEL = "is no kernel: it must define ModelNew or kernel_function"
Constants = dict[str, object]  # of a configuration: the value of each, by name
Assignments = dict[str, ast.Assign | ast.AnnAssign]  # of a module, by the name that is assigned


class Unloadable(Exception):
    """Why a file holds no candidate that can be loaded."""


@dataclass(frozen=True)
class Candidate:
    """One variant. name: the file's stem, with its constants in brackets for a configuration. source: the text that
    runs. error: why it cannot be loaded, so that it is never started; None for all others. is_probe: it leaves out a
    part of the work, to show what the rest takes: PROBE is true there. file: the user's."""

    name: str
    config: Constants
    source: str
    error: str | None = None
    is_probe: bool = False
    file: Path | None = None


def from_paths(paths: list[Path]) -> list[Candidate]:
    """The candidates of the files and folders; one with an error for a file that cannot be loaded. UsageError when a
    path is not there, no file has a kernel, two have one name, or they are too many."""
    if missing := next((path for path in paths if not path.exists()), None):
        raise UsageError(f"{missing} is neither a file nor a folder")
    files = [file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
    candidates = [candidate for file in files for candidate in of_file(file)]
    if all(candidate.error and candidate.error.endswith(NO_KERNEL) for candidate in candidates):
        raise UsageError(
            f"no candidate in {', '.join(map(str, paths))}: pass .py files with ModelNew or kernel_function"
        )
    return checked(candidates)


def checked(candidates: list[Candidate]) -> list[Candidate]:
    """UsageError when they are too many, or two have one name."""
    if len(candidates) > MOST:
        advice = "make the SPACE smaller, or leave out --hints"
        raise UsageError(f"{len(candidates)} candidates are more than {MOST}; {advice}")
    names = [candidate.name for candidate in candidates]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two candidates have the name {twice}; rename a file or a constant")
    return candidates


def of_file(file: Path) -> list[Candidate]:
    """One candidate, or one per configuration of the file's SPACE."""
    source = ""
    try:
        source = text_of(file)
        known = assignments_of_kernel(source, file)
        configs = space_of(known, file)
        found = [Candidate(file.stem, {}, source)]
        if configs is not None:
            configured = [(config, with_constants(source, known, config, file)) for config in configs]
            found = different(configured, file.stem)
        return [replace(one, is_probe=is_probe(known, one.config), file=file) for one in found]
    except Unloadable as why:
        return [Candidate(file.stem, {}, source, str(why), file=file)]


def is_probe(known: Assignments, config: Constants) -> bool:
    """Is PROBE true in this configuration of the module?"""
    own = constant_of(known[PROBE].value) if PROBE in known else None
    return bool(config.get(PROBE, own is not None and is_literal(own) and ast.literal_eval(own)))


def different(configured: list[tuple[Constants, str]], stem: str) -> list[Candidate]:
    """A candidate for each configuration, of those with the same source for the first alone."""
    configs: dict[str, Constants] = {}  # by source
    for config, source in configured:
        configs.setdefault(source, config)
    return [Candidate(name_of(stem, config), config, source) for source, config in configs.items()]


def builds_cuda(source: str) -> bool:
    """Does the text name torch's builder of CUDA C++?"""
    return "cpp_extension" in source


def compiles_torch(source: str) -> bool:
    """Does the text build CUDA C++ with torch's headers? Files that it
    builds and does not hold itself count as such, since `load` binds them by these headers as a rule."""
    inline = "load_inline(" in source and "no_implicit_headers" not in source
    of_files = builds_cuda(source) and LOADS_FILES.search(source) and "#include" not in source
    return bool(TORCH_HEADER.search(source) or inline or of_files)


def text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise Unloadable(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Unloadable(
            f"{file} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None


def parsed(source: str, file: Path) -> ast.Module:
    """The module. Unloadable, with the parser's message and the line that it points at, for a text that is none."""
    try:
        return ast.parse(source)
    except SyntaxError as error:
        place = f"{file}, line {error.lineno}" if error.lineno else str(file)
        line, pointer = (error.text or "").rstrip(), " " * max(0, (error.offset or 1) - 1) + "^"
        shown = f"\n{line}\n{pointer}" if line else ""
        raise Unloadable(f"{type(error).__name__}: {error.msg} ({place}){shown}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unloadable(f"{file} is no Python that can be parsed: {type(error).__name__}: {error}") from None


def name_of(stem: str, config: Constants) -> str:
    """space[BLOCK=64,WARPS=4]; the stem alone for the file's own constants."""
    return f"{stem}[{constants_of(config)}]" if config else stem


def short_name(name: str) -> str:
    """A name as a table shows it: cut in the middle of its stem, with all of its constants, which tell it apart."""
    stem, bracket, constants = name.partition("[")
    most = max(LEAST_OF_STEM, MOST_CHARACTERS - len(bracket + constants))
    if len(stem) > most:
        stem = f"{stem[: most // 2]}…{stem[len(stem) - (most - 1 - most // 2) :]}"
    return f"{stem}{bracket}{constants}"


def constants_of(config: Constants) -> str:
    """BLOCK=64,WARPS=4; on one line, whatever the values are."""
    shown = {name: str(value) if str(value).isprintable() else repr(value) for name, value in config.items()}
    return ",".join(f"{name}={value}" for name, value in shown.items())


def assignments_of_kernel(source: str, file: Path) -> Assignments:
    """The `assignments` of a file's text. Unloadable where it has no kernel, or more of a SPACE than one of these."""
    module = parsed(source, file)
    if not is_kernel(names_in(module)):
        raise Unloadable(f"{file} {NO_KERNEL}")
    known = assignments(module)
    if more := next(more_of_space(module.body, known.get(SPACE)), None):
        text = ast.unparse(more).split("\n")[0]
        raise Unloadable(
            f"{file}: line {more.lineno}: {text} is not read; write all configurations in one assignment, {SPACE} = …"
        )
    return known


def more_of_space(statements: list[ast.stmt], read: ast.stmt | None) -> Iterator[ast.stmt]:
    """Statements outside of functions and classes that make or change a SPACE, beside the one that is read."""
    for statement in statements:
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or statement is read:
            continue
        if any(blocks):
            handlers = [one.body for one in getattr(statement, "handlers", [])]
            for block in [*blocks, *handlers]:
                yield from more_of_space(block, read)
        elif any(
            isinstance(node, ast.Name) and node.id == SPACE for one in changed(statement) for node in ast.walk(one)
        ):
            yield statement


def changed(statement: ast.stmt) -> list[ast.expr]:
    """What a statement assigns to, or calls a method of."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return [statement.value.func] if isinstance(statement.value.func, ast.Attribute) else []
    return getattr(statement, "targets", None) or ([statement.target] if hasattr(statement, "target") else [])


def space_of(known: Assignments, file: Path) -> list[Constants] | None:
    """The configurations of a module-level SPACE, a literal: a list of dicts, or a dict of lists, which means their
    product. An empty dict in a list: the module's own constants. Unloadable where it is neither."""
    space = known.get(SPACE)
    if space is None:
        return None
    if wrong := wrong_in(space.value):
        raise Unloadable(f"{file}: {wrong}")
    return configurations(ast.literal_eval(space.value))


def wrong_in(space: ast.expr) -> str | None:
    """What is wrong with the value of a SPACE, and in which entry; None where nothing is."""
    if isinstance(space, ast.Dict):
        entries = [
            (ast.unparse(name) if name else "**", value) for name, value in zip(space.keys, space.values, strict=True)
        ]
        kinds, each = (ast.List, ast.Tuple), "a list of values"
    elif isinstance(space, ast.List | ast.Tuple):
        entries = [(str(number), value) for number, value in enumerate(space.elts)]
        kinds, each = (ast.Dict,), "a dict of constants"
    else:
        return f"SPACE is {ast.unparse(space)}; {KINDS_OF_SPACE}"
    for place, value in entries:
        entry = f"SPACE[{place}] is {ast.unparse(value)}"
        if not isinstance(value, kinds):
            return f"{entry}; each entry is {each}"
        if not is_literal(value):
            return f"{entry}, which is no literal"
        if isinstance(value, ast.List | ast.Tuple) and not value.elts:
            return f"{entry}; each entry is {each}, at least one"
    if not entries:
        return f"SPACE is empty; {KINDS_OF_SPACE}"
    return None if is_literal(space) else f"SPACE is {ast.unparse(space)}, which is no literal"


def is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError):
        return False
    return True


def configurations(space: list | tuple | dict) -> list[Constants]:
    """Those of a SPACE in which nothing is wrong."""
    if isinstance(space, dict):
        return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    return list(space)


def assignments(module: ast.Module) -> Assignments:
    """The last top-level assignment to each name of a module that is assigned on its own."""
    return {name: node for name, node in assigned(module) if not isinstance(node, ast.Assign) or len(node.targets) == 1}


def with_constants(source: str, known: Assignments, config: Constants, file: Path) -> str:
    """The source with the constants of a configuration in place of the module's, and without its SPACE."""
    text = source.encode()
    starts = line_starts(text)
    edits = {removed(text, *span_of(known[SPACE], starts))}
    for name, value in config.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name)) or name not in known or name == SPACE:
            raise Unloadable(
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


def line_starts(text: bytes) -> list[int]:
    """Where each line of a text begins, in bytes."""
    return [0, *(at + 1 for at, byte in enumerate(text) if byte == ord("\n"))]


def span_of(node: ast.stmt | ast.expr, starts: list[int]) -> tuple[int, int]:
    """Where a node begins and ends, in bytes. starts: of the lines."""
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def removed(text: bytes, start: int, end: int) -> tuple[int, int, bytes]:
    """(begin, end, new text) to remove a statement: with its lines, unless another one stands there."""
    first, last = text.rfind(b"\n", 0, start) + 1, text.find(b"\n", end) + 1 or len(text)
    if text[first:start].strip() or not re.fullmatch(rb"\s*(#.*)?\s*", text[end:last]):
        return start, end, b"pass"
    return first, last, b""
