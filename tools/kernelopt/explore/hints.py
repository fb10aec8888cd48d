"""Hints to the L2: variants of a candidate in Triton whose loads ask it to keep their lines, or to drop them first."""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..errors import UsageError
from . import candidates
from .candidates import Candidate, Constants, name_of

KEEP, DROP, NONE = "evict_last", "evict_first", "none"
POLICY = "eviction_policy"
MOST_ALONE = 4  # pointers whose loads are tried alone
LANGUAGE = "triton.language"
BEFORE_MODIFIER = 5  # of the arguments of tl.load
DECIDED = {"cache_modifier", "volatile"}  # ptxas refuses a hint beside them
WITHOUT_A_HINT = "--hints: no candidate has a tl.load to put a hint on; docs/exploring.md says which get one"


def with_variants(entries: list[Candidate]) -> list[Candidate]:
    """The candidates, each followed by its variants. UsageError when none has any, or they are too many."""
    found = [one for entry in entries for one in [entry, *variants(entry)]]
    if len(found) == len(entries):
        raise UsageError(WITHOUT_A_HINT)
    return candidates.checked(found)


def variants(entry: Candidate) -> Iterator[Candidate]:
    """All plain loads with a hint, KEEP and DROP in turn, and without the hints that the source has; then, of few
    pointers, those of each alone with KEEP. What is the same program as one before is left out. A probe has none: it is
    no kernel to be kept."""
    if entry.error or entry.is_probe:
        return
    module = ast.parse(entry.source)
    calls, parameters = list(plain_loads(module)), parameters_of(module)
    by_pointer: dict[str, list[ast.Call]] = {}
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        by_pointer.setdefault(pointer_of(call, parameters), []).append(call)
    found = [variant(entry, {"loads": hint}, calls, hint) for hint in (KEEP, DROP)]
    found.append(variant(entry, {"loads": NONE}, [call for call in calls if policy_of(call)], ""))
    if 1 < len(by_pointer) <= MOST_ALONE:
        found += [variant(entry, {f"load({pointer})": KEEP}, own, KEEP) for pointer, own in by_pointer.items()]
    programs = {ast.dump(module)}
    for one in found:
        if (program := ast.dump(ast.parse(one.source))) not in programs:
            programs.add(program)
            yield one


def variant(entry: Candidate, hinted: Constants, calls: list[ast.Call], hint: str) -> Candidate:
    config = {**entry.config, **hinted}
    source = with_policy(entry.source, calls, hint)
    return replace(entry, name=name_of(entry.file.stem, config), config=config, source=source)


def plain_loads(module: ast.Module) -> Iterator[ast.Call]:
    """Calls of Triton's load that leave the cache to it, or give it a hint in so many words."""
    prefixes = {f"{name}." for name in names_of_language(module)}
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).removesuffix("load") not in prefixes:
            continue
        given = {keyword.arg for keyword in node.keywords}  # None for **more
        unknown = None in given or any(isinstance(one, ast.Starred) for one in node.args)
        unknown |= POLICY in given and policy_of(node) is None
        if address_of(node) and len(node.args) <= BEFORE_MODIFIER and not unknown and not given & DECIDED:
            yield node


def address_of(call: ast.Call) -> ast.expr | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == "pointer"]
    return next(iter([*call.args, *named]), None)


def policy_of(call: ast.Call) -> ast.Constant | None:
    """The hint that a call names as a string."""
    policies = [one.value for one in call.keywords if one.arg == POLICY]
    return next((one for one in policies if isinstance(one, ast.Constant) and isinstance(one.value, str)), None)


def pointer_of(call: ast.Call, parameters: set[str]) -> str:
    """The first parameter in a load's address, x in `row * columns + x + at`; else its first name."""
    nodes = [node for node in ast.walk(address_of(call)) if isinstance(node, ast.Name)]
    names = [node.id for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset))]
    return next((name for name in names if name in parameters), next(iter(names), "a number"))


def parameters_of(module: ast.Module) -> set[str]:
    """Of all functions, but for those that are annotated, as constants are."""
    signatures = [node.args for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    return {one.arg for given in signatures for one in [*given.posonlyargs, *given.args] if one.annotation is None}


def names_of_language(module: ast.Module) -> set[str]:
    """By which a module calls triton.language."""
    names = {LANGUAGE}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name == LANGUAGE and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "triton":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "language"}
    return names


def with_policy(source: str, calls: Iterable[ast.Call], hint: str) -> str:
    """The source with this hint in these calls, as one more argument or in place of their own. Lines keep numbers."""
    text, starts = source.encode(), candidates.line_starts(source.encode())
    for begin, end, argument in sorted((edit_of(text, call, starts, hint) for call in calls), reverse=True):
        text = text[:begin] + argument.encode() + text[end:]
    return text.decode()


def edit_of(text: bytes, call: ast.Call, starts: list[int], hint: str) -> tuple[int, int, str]:
    """(from where to where, in bytes, a call changes; what stands there then)."""
    if policy := policy_of(call):
        begin, end = candidates.span_of(policy, starts)
        return begin, end, f'"{hint}"' + "\n" * text[begin:end].count(b"\n")
    at, separator = end_of_arguments(text, call, starts)
    return at, at, f'{separator} {POLICY}="{hint}"'


def end_of_arguments(text: bytes, call: ast.Call, starts: list[int]) -> tuple[int, str]:
    """(where another argument of a call goes, in bytes; the comma before it, unless one stands there)."""
    begin, end = candidates.span_of(call, starts)
    own = text[begin:end].decode()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
    tokens = [one for one in tokenize.generate_tokens(io.StringIO(own).readline) if one.type not in skipped]
    row, column = tokens[-2].end  # the last one is the closing parenthesis
    lines = own.split("\n")  # not splitlines, which knows other ends of lines
    before = "\n".join([*lines[: row - 1], lines[row - 1][:column]])
    return begin + len(before.encode()), "" if tokens[-2].string == "," else ","
