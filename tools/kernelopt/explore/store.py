"""The files of an exploration in a workspace: explore/eN.json, and each candidate's file in explore/eN/."""

import hashlib
import re
import statistics
from pathlib import Path

from .. import bundle
from ..errors import UsageError
from ..session.explorations import folder_of, numbers
from ..session.workspace import Workspace
from ..statuses import Status
from . import halving
from .entrants import Entrant

CITED = re.compile(r"(?:explore/)?(e[1-9][0-9]*)(?:\.json)?#(.+)")


def rows(entrants: list[Entrant], against: str | None) -> list[dict]:
    """A row for each entrant, in their order. Times in microseconds, cold; sizes in bytes, of one thread or one
    block."""
    opponent = next((entrant for entrant in entrants if entrant.name == against), None)
    return [row(entrant, opponent) for entrant in entrants]


def row(entrant: Entrant, opponent: Entrant | None) -> dict:
    ratio = None
    if opponent and opponent is not entrant and entrant.calls_us and opponent.calls_us:
        ratio = halving.ratio(entrant.rounds_us, opponent.rounds_us)
    resources = ("kernel", "registers", "spill_bytes", "shared_bytes", "occupancy_pct")
    return {
        "name": entrant.name,
        "config": entrant.config,
        "opponent": entrant.is_opponent,
        "status": entrant.status,
        "latency_us": latency_us(entrant.calls_us),
        "against_best": ratio and ratio.to_json(),
        **{name: entrant.resources.get(name) for name in resources},
        "sm_clock_mhz": entrant.sm_clock_mhz,
        "sustained_us": entrant.sustained_us,
        "metrics": entrant.metrics,
        "dropped": entrant.dropped,
        "error": entrant.error,
        "kernel_sha256": hashlib.sha256(entrant.file.read_bytes()).hexdigest(),
    }


def latency_us(calls_us: list[float]) -> dict | None:
    if not calls_us:
        return None
    fifths = statistics.quantiles(calls_us, n=5, method="inclusive") if len(calls_us) > 1 else 4 * calls_us
    return {"median": statistics.median(calls_us), "p20": fifths[0], "p80": fifths[3], "n": len(calls_us)}


def save(workspace: Workspace, result: dict, entrants: list[Entrant]) -> Path:
    """Write the result as the next exploration, and each candidate's file beside it."""
    name = f"e{max(numbers(workspace), default=0) + 1}"
    files = folder_of(workspace) / name
    for entrant in entrants:
        bundle.write_bytes(files / file_name(entrant.name), entrant.file.read_bytes())
    path = folder_of(workspace) / f"{name}.json"
    bundle.write_json(path, {"exploration": name, **result})
    return path


def file_name(name: str) -> str:
    """A candidate's name as that of a file; names stay different when they differ only in characters that a file name
    cannot hold."""
    plain = re.sub(r"[^A-Za-z0-9_.=,-]", "_", name)[:120]
    return f"{plain}.{hashlib.sha256(name.encode()).hexdigest()[:8]}.py"


def read(workspace: Workspace, number: int) -> dict:
    return bundle.read_json(folder_of(workspace) / f"e{number}.json")


def find(workspace: Workspace, name: str) -> tuple[str, dict, Path]:
    """(exploration, row, file) of a candidate: `NAME` of the newest exploration that has it, or `eN#NAME`."""
    cited = CITED.fullmatch(name)
    wanted, only = (cited[2], cited[1]) if cited else (name, None)
    for number in reversed(numbers(workspace)):
        if only in (None, f"e{number}"):
            for candidate in read(workspace, number)["rows"]:
                if candidate["name"] == wanted:
                    return f"e{number}", candidate, folder_of(workspace) / f"e{number}" / file_name(wanted)
    raise UsageError(
        f"no exploration of {workspace.root} has a candidate '{name}'; its tables: {folder_of(workspace)}/eN.json"
    )


def keep(workspace: Workspace, name: str) -> str:
    """Make a candidate the workspace's kernel.py, and return the message for the user. UsageError when it is wrong, or
    its file was changed."""
    exploration, candidate, file = find(workspace, name)
    if candidate["status"] != Status.OK:
        raise UsageError(f"{candidate['name']} of {exploration} is {candidate['status']}; nothing was written")
    content = bundle.read_bytes(file)
    if hashlib.sha256(content).hexdigest() != candidate["kernel_sha256"]:
        raise UsageError(f"{file} was changed since {exploration}; explore it again")
    bundle.write_bytes(workspace.kernel, content)
    row = candidate["name"]
    return f"kernel.py is now {row} of {exploration}; cite it in the plan as explore/{exploration}.json#{row}"
