"""Rows of explorations that a plan cites: `explore/e3.json#name` must be a row of that file (explore/store.py writes
it)."""

import re
from collections.abc import Iterator
from pathlib import Path

from .. import bundle
from ..errors import ToolError
from .citations import Problem

# A name is a file's stem, and for a configuration its constants in brackets.
CITED = re.compile(r"\bexplore/(?P<file>e[1-9]\d{0,6}\.json)#(?P<name>[\w.+-]+(?:\[[^\]\n]*\])?)")


def problems(text: str, root: Path) -> Iterator[Problem]:
    """A problem for each row that a text cites and the workspace `root` does not have."""
    for cited in CITED.finditer(text):
        if cited["name"] not in names(root / "explore" / cited["file"]):
            line = text.count("\n", 0, cited.start()) + 1
            yield Problem(line, "exploration", f"explore/{cited['file']} has no row '{cited['name']}'")


def names(file: Path) -> set[str]:
    """The candidates of an exploration; empty where the file cannot be read as one."""
    try:
        return {row["name"] for row in bundle.read_json(file)["rows"]}
    except (ToolError, KeyError, TypeError):
        return set()
