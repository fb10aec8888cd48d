"""Checks of the exploration rows that a plan cites. `explore/e3.json#name` must name a row of that file, which
explore/store.py writes."""

import re
from collections.abc import Iterator
from pathlib import Path

from .. import bundle
from ..errors import ToolError
from .citations import Problem

# A name is a file's stem, and for a configuration its constants in brackets.
CITED = re.compile(r"\bexplore/(?P<file>e[1-9]\d{0,6}\.json)#(?P<name>[\w.+-]+(?:\[[^\]\n]*\])?)")


def problems(text: str, root: Path) -> Iterator[Problem]:
    """Yield a problem for each cited row that the workspace `root` does not have."""
    for cited in CITED.finditer(text):
        if cited["name"] not in names(root / "explore" / cited["file"]):
            line = text.count("\n", 0, cited.start()) + 1
            yield Problem(line, "exploration", f"explore/{cited['file']} has no row '{cited['name']}'")


def names(file: Path) -> set[str]:
    """Return the candidates of an exploration. The result is empty if the file is not a valid exploration."""
    try:
        return {row["name"] for row in bundle.read_json(file)["rows"]}
    except (ToolError, KeyError, TypeError):
        return set()
