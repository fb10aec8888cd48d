"""The opponents that the wiki has for an operator: files of gpu-wiki/baselines/OPERATOR/, read and not loaded.

A file's docstring says what it does in its first line, then `Arguments:`, and where they apply `Package:`,
`GPU: needed` and `Interface:` (where the library documents the call).
"""

import ast
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import Refused, UsageError


@dataclass(frozen=True)
class Baseline:
    """One opponent. arguments: of its kernel_function. package: which it needs beside torch. interface: the library's
    documentation of the call."""

    operator: str
    file: Path
    does: str
    arguments: str
    needs_gpu: bool
    package: str | None = None
    interface: str | None = None


def all_of(wiki: Path) -> list[Baseline]:
    """Return all baselines of a wiki, by operator and name. Raise UsageError for a file without its docstring."""
    return [read(file) for file in sorted((wiki / "baselines").glob("*/*.py"))]


def read(file: Path) -> Baseline:
    """Return the baseline that a file's docstring describes."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    does, *rest = docstring.splitlines() or [""]
    fields = dict(re.findall(r"^(Arguments|Package|GPU|Interface): (.+)$", "\n".join(rest), re.MULTILINE))
    if not does or "Arguments" not in fields:
        raise UsageError(f"{file}: the docstring must say what it does, and `Arguments:`")
    needs_gpu = fields.get("GPU") == "needed"
    return Baseline(
        file.parent.name, file, does, fields["Arguments"], needs_gpu, fields.get("Package"), fields.get("Interface")
    )


def for_operator(baselines: list[Baseline], words: str) -> list[Baseline]:
    """Return the baselines of an operator: by its name, else those that have all words. Raise Refused if
    there are none."""
    asked = re.findall(r"[a-z0-9]+", words.lower())
    named = [baseline for baseline in baselines if baseline.operator == "-".join(asked)]
    matching = named or [baseline for baseline in baselines if asked and words_of(baseline).issuperset(asked)]
    if not matching:
        operators = sorted({baseline.operator for baseline in baselines})
        raise Refused(f"the wiki has no baseline for '{words}'; it has {', '.join(operators)}")
    return matching


def words_of(baseline: Baseline) -> set[str]:
    """Return the lower-case words in which those of an operator are looked for."""
    return set(re.findall(r"[a-z0-9]+", f"{baseline.operator} {baseline.file.stem} {baseline.does}".lower()))


def installed_version(package: str) -> str | None:
    """Return the version of a package in this environment, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
