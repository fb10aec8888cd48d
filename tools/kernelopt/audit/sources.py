"""Functions that cut programs into the pieces that are audited: comments, docstrings and named constants. All
functions are pure."""

import ast
import bisect
import contextlib
import io
import operator
import re
import tokenize
from collections.abc import Iterator

from .citations import Piece
from .units import Pattern

MARK = Pattern(r"(?m)^[ \t]*(?:#+:?|//+|/\*+|\*/?)")  # of a comment's line
C_COMMENT = Pattern(r"//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/", re.DOTALL)
C_SOURCE = Pattern(r"[;{}]\s*\n|^\s*#\s*(?:define|include)", re.MULTILINE)
_literal = r"(?:0[xX][0-9a-fA-F]+|\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?)[uUlLfF]{0,3}"
EXPRESSION = rf"{_literal}(?:\s*(?:\*\*?|<<|/)\s*{_literal})*"
CONSTANT = Pattern(
    r"(?P<name>[A-Za-z_]\w{1,60})[\"']?\s*(?::\s*[A-Za-z][\w.\[\] |]{0,40}?\s*(?==)|)"
    r"(?:[:=]|,(?=\s*\d)|(?<=[A-Z])[ \t]+(?=\d))\s*(?:[A-Za-z_][\w.:]{0,40}\()?[\[({]?\s*(?P<value>"
    + EXPRESSION
    + r")(?![\w.])"
)
TUPLE = Pattern(r"^[ \t]*(?P<names>\w+(?:[ \t]*,[ \t]*\w+)+)[ \t]*=[ \t]*(?P<values>[^\n#=]+)", re.MULTILINE)
LAUNCH = Pattern(r"\w\[\s*\(?\s*(?P<python>\d{2,4})\s*,[^\]\n]{0,200}\]\s*\(|<<<\s*(?P<cuda>\d{2,4})\s*,")
# min(132, tiles) in a grid
LEAST = Pattern(
    r"(?:[Gg]rid\w*\s*=|\w\[)[^\n]{0,80}?\bmin\(\s*"
    r"(?:(?P<first>\d{2,4})\s*,|[^()\n]{0,60}(?:\([^()\n]{0,60}\))?[^()\n]{0,20},\s*(?P<last>\d{2,4})\s*\))"
)
GRID = Pattern(r"(?i)(?:^|_)(?:grid|programs|ctas|blocks|persistent|workers)(?:$|_|\d)")
WAVES = Pattern(r"(?P<less>\d{2,4})\s*\*\s*\d|\d\s*\*\s*(?P<more>\d{2,4})")
LONGEST_CODE = 1 << 20  # characters; a longer file is data


def of_code(text: str, python: bool) -> Iterator[Piece]:
    """Yield the comments, docstrings and named constants of a program. C code in Python strings counts as code."""
    if len(text) > LONGEST_CODE:
        return
    whole = tokens(text) if python else [(0, len(text))]
    places = [place for start, end in whole for place in prose(text, start, end, python)]
    starts = line_starts(text)
    code, at = [], 0
    for start, end in places:
        words = MARK.sub(lambda match: " " * len(match[0]), text[start:end])
        yield Piece(words, bisect.bisect(starts, start), -1, code=True)
        code += [text[at:start], re.sub(r"[^\n]", " ", text[start:end])]
        at = end
    for name, expression, place, written in constants("".join([*code, text[at:]])):
        value = evaluated(one_wave(expression) if GRID.search(name) else expression)
        if value is not None and (label := label_of(name, value)):
            line = bisect.bisect(starts, place)
            yield Piece(f"{value:.15g}", line, -1, label, code=True, spelling=" ".join(written.split()))


def line_starts(text: str) -> list[int]:
    return [0, *(match.end() for match in re.finditer(r"\n", text))]


def tokens(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of strings and comments, as far as the text is Python. Comments on adjacent lines form one
    token."""
    starts = line_starts(text)
    last = None
    with contextlib.suppress(tokenize.TokenError, SyntaxError, IndexError):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (tokenize.STRING, tokenize.COMMENT):
                continue
            start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            if last and token.type == tokenize.COMMENT and re.fullmatch(r"[ \t]*\n[ \t]*", text[last[1] : start]):
                last = (last[0], end)
                continue
            if last:
                yield last
            last = (start, end)
    if last:
        yield last


def prose(text: str, start: int, end: int, python: bool) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the prose in a token: a whole comment or docstring, or the comments of embedded C. A
    string of one word is a key."""
    if python and not C_SOURCE.search(text, start, end):
        if text[start] == "#" or " " in text[start:end]:
            yield start, end
        return
    yield from (comment.span() for comment in C_COMMENT.finditer(text, start, end))


def constants(text: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield (name, expression, place, source text) of named numbers: assignments, arguments, keys and #define. The
    first number of a launch counts too."""
    for match in CONSTANT.finditer(text):
        yield match["name"], match["value"], match.start(), match[0]
    for match in TUPLE.finditer(text):
        for name, value in zip(match["names"].split(","), match["values"].split(","), strict=False):
            if re.fullmatch(EXPRESSION, value.strip()):
                yield name.strip(), value.strip(), match.start(), f"{name} = {value}"
    for match in LAUNCH.finditer(text):
        yield "grid", match["python"] or match["cuda"], match.start(), match[0]
    for match in LEAST.finditer(text):
        yield "grid", match["first"] or match["last"], match.start(), match[0]


def label_of(name: str, value: float) -> str:
    """Return the label of a constant. A launch grid counts as the number of SMs, unless it is a multiple of 8. Such
    a grid has no label."""
    if GRID.search(name):
        return "number of SMs" if value % 8 else ""
    return name


def one_wave(expression: str) -> str:
    """Return the number of programs of one wave: "108" for "108 * 2" and for "2 * 108"."""
    factors = WAVES.fullmatch(expression)
    return expression if factors is None else factors["more"] or factors["less"]


OPERATORS = {
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, power: base**power if 0 <= power <= 64 and abs(base) <= 1024 else None,
    ast.LShift: lambda value, bits: value << bits if isinstance(value, int) and 0 <= bits <= 64 else None,
}


def evaluated(expression: str) -> float | None:
    """Return the value of products, powers and shifts of numbers, or None for any other expression."""
    plain = re.sub(r"(?<=[\dA-Fa-f])[uUlL]+|(?<=[\d.])[fF]\b(?!.*0[xX])", "", expression.strip())
    with contextlib.suppress(SyntaxError, ValueError, TypeError, ZeroDivisionError, OverflowError, MemoryError):
        value = _evaluated(ast.parse(plain, mode="eval").body)
        return float(value) if value is not None and abs(value) < 1e18 else None
    return None


def _evaluated(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    return None
