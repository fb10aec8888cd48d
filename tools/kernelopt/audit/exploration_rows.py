"""Checks of the exploration rows that a plan cites. `explore/e3.json#name` must name a row of that file, which
explore/store.py writes, and a row that shows a speed must be of a kernel that is right."""

from collections.abc import Iterator
from pathlib import Path

from .. import bundle
from ..errors import ToolError
from ..session.explorations import CITED
from ..statuses import Status
from .citations import Problem


def problems(text: str, root: Path) -> Iterator[Problem]:
    """Yield a problem for each cited row that the workspace `root` does not have, or whose kernel is wrong and the line
    does not say so."""
    for number, line in enumerate(text.splitlines(), 1):
        for cited in CITED.finditer(line):
            if cited["row"] and (message := wrong(cited["exploration"], cited["row"], line, root)):
                yield Problem(number, "exploration", message)


def wrong(exploration: str, row: str, line: str, root: Path) -> str | None:
    """What is wrong with a citation in a line; None where it holds."""
    file = f"explore/{exploration}.json"
    status = statuses(root / file).get(row)
    if status is None:
        return f"{file} has no row '{row}'"
    if status == Status.OK or status in line:
        return None
    return f"{file}#{row} is {status}, so it shows no speed; cite a row that is OK, or write {status} beside it"


def statuses(file: Path) -> dict[str, str]:
    """Return the status of each entrant of an exploration. The result is empty if the file is not a valid
    exploration."""
    try:
        return {row["name"]: row["status"] for row in bundle.read_json(file)["rows"]}
    except (ToolError, KeyError, TypeError):
        return {}
