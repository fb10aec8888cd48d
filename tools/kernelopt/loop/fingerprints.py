"""The fingerprint of a kernel: it is the same for kernels that differ only in comments, docstrings and layout."""

import hashlib
import io
import tokenize
from collections.abc import Iterator


def fingerprint(kernel: str) -> str:
    """SHA-256 of the kernel's code, in hexadecimal; of the text itself when Python cannot read it."""
    try:
        code = "\n".join(statements(kernel))
    except (SyntaxError, ValueError, tokenize.TokenError):
        code = kernel.strip()
    return hashlib.sha256(code.encode(errors="replace")).hexdigest()


def statements(kernel: str) -> Iterator[str]:
    """The statements of a Python text, without those that are one string.

    Read token by token: the syntax tree of an agent's text may take gigabytes. SyntaxError when it is no Python.
    """
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(kernel).readline):
        if token.type == tokenize.ERRORTOKEN and not token.string.isspace():
            raise SyntaxError("no Python")  # Python 3.11 would go on, endlessly on a long line
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            yield tokenize.tok_name[token.type]
        elif token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if [part.type for part in statement] != [tokenize.STRING]:
                yield " ".join(part.string for part in statement)
            statement = []
        elif token.type not in (tokenize.COMMENT, tokenize.NL):
            statement.append(token)
